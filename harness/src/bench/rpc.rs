//! `bench rpc`: the latency of the node's calls with few volumes on the node and with many.

use anyhow::Result;
use testvm::rust_build;
use testvm::session::Session;
use testvm::vm::GuestFile;

use super::guest;
use super::measurement::Measurements;
use super::outcome::{Args, Outcome};
use super::plot::Plot;
use super::threshold::{self, Threshold};
use crate::builds::{self, ProgramProfile};

/// The path of the driver's program in the guest.
const DRIVER: &str = "/tests/programs/loopfs-csi";

/// The calls by the name that starts their rows in `csi/benches/rpc/calls.rs`.
const CALLS: [(&str, &str); 4] = [
    ("publish", "NodePublishVolume"),
    ("stats", "NodeGetVolumeStats"),
    ("expand", "NodeExpandVolume"),
    ("unpublish", "NodeUnpublishVolume"),
];
const KINDS: [&str; 2] = ["filesystem", "block"];

/// The largest ratio of the latency with many volumes to that with few: a call may not look at other volumes.
const FACTOR: f64 = 1.2;

const PLOTS: [Plot; 2] = [
    Plot::new(
        "Calls for a mounted volume",
        "volumes on the node",
        &["publish_filesystem", "stats_filesystem", "expand_filesystem", "unpublish_filesystem"],
    ),
    Plot::new(
        "Calls for a Block volume",
        "volumes on the node",
        &["publish_block", "stats_block", "expand_block", "unpublish_block"],
    ),
];

pub(super) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let program = session.until_cancelled(rust_build::bench(session, "csi", "rpc")).await?;
    let driver =
        session.until_cancelled(builds::driver_programs(session, ProgramProfile::Release)).await?.csi;
    let beside = vec![GuestFile { path: DRIVER.to_owned(), mode: 0o755, host: driver }];
    let runs = [args.of_program(&[guest::XFS, DRIVER])];
    let parts = guest::run(session, args.kernel.as_deref(), &program, beside, &runs, guest::DISK_MIB).await?;
    Ok(Outcome::new(parts, thresholds, &PLOTS))
}

fn thresholds(all: &Measurements) -> Vec<Threshold> {
    let mut thresholds = Vec::new();
    for kind in KINDS {
        for (row, call) in CALLS {
            let name = format!("{row}_{kind}");
            let counts = all.counts(&name);
            let (few, many) =
                (counts.first().copied().unwrap_or_default(), counts.last().copied().unwrap_or_default());
            let text = format!(
                "{call} of a {kind} volume: with {many} volumes on the node within {FACTOR} times the time with {few}"
            );
            thresholds.push(threshold::at_most(all, &text, (&name, many), FACTOR, (&name, few)));
        }
    }
    thresholds
}

#[cfg(test)]
mod tests {
    use super::super::measurement::Row;
    use super::*;

    #[test]
    fn each_call_of_each_kind_has_a_threshold_that_compares_many_volumes_with_few() {
        let row = |name: &str, n, value| Row::of(name, n, "us", [value]).unwrap();
        let all = Measurements::of(vec![
            row("publish_block", 1000, 12.0),
            row("publish_block", 10, 10.0),
            row("stats_block", 10, 10.0),
            row("stats_block", 1000, 12.1),
        ]);
        let thresholds = thresholds(&all);
        assert_eq!(thresholds.len(), 8);
        let decided: Vec<(f64, Option<bool>)> = thresholds
            .iter()
            .filter_map(|threshold| Some((threshold.ratio.as_ref()?.value, threshold.is_met)))
            .collect();
        assert_eq!(decided, [(1.2, Some(true)), (1.21, Some(false))]);
    }

    #[test]
    fn the_plots_have_the_rows_of_the_thresholds() {
        let all = Measurements::of(Vec::new());
        assert_eq!(thresholds(&all).len(), PLOTS.iter().map(|plot| plot.names.len()).sum::<usize>());
        for (plot, kind) in PLOTS.iter().zip(KINDS) {
            let names = CALLS.map(|(row, _)| format!("{row}_{kind}"));
            assert!(plot.names.iter().all(|name| names.contains(&(*name).to_owned())), "{:?}", plot.names);
        }
    }
}
