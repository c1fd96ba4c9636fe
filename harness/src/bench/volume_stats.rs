//! `bench csi`: the driver's statistics of volumes with few files and with many, compared with `du -s`.

use anyhow::Result;
use testvm::images::shell;
use testvm::rust_build;
use testvm::session::Session;
use testvm::vm::GuestFile;

use super::guest;
use super::measurement::Measurements;
use super::outcome::{Args, Outcome};
use super::plot::Plot;
use super::threshold::{self, Threshold};

const BUSYBOX: &str = "/tests/busybox";
const PLOT: Plot = Plot::new("Usage of a volume", "files", &["volume_stats", "du"]);

pub(super) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let program = session.until_cancelled(rust_build::bench(session, "csi", "volume_stats")).await?;
    let busybox = session.until_cancelled(shell::busybox(session)).await?;
    let beside = vec![GuestFile { path: BUSYBOX.to_owned(), mode: 0o755, host: busybox }];
    let runs = [args.of_program(&[guest::XFS, BUSYBOX, "du"])];
    let parts = guest::run(session, args.kernel.as_deref(), &program, beside, &runs, guest::DISK_MIB).await?;
    Ok(Outcome::new(parts, thresholds, &[PLOT]))
}

fn thresholds(all: &Measurements) -> Vec<Threshold> {
    let most = all.counts("volume_stats").last().copied().unwrap_or_default();
    let text = format!("NodeGetVolumeStats: as long with few files as with {most}, within 1.5 times");
    let flat = threshold::flat(all, &text, "volume_stats", 1.5);
    let text = format!("NodeGetVolumeStats of {most} files: 20 times as fast as du -s");
    vec![flat, threshold::faster(all, &text, ("volume_stats", most), 20.0, ("du", most))]
}
