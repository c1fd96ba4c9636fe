//! `losetup -j` of util-linux and of this project.

use std::ffi::OsString;

use anyhow::{Context, Result};
use testvm::images::debian_program::LOSETUP;
use testvm::rust_build;
use testvm::session::Session;
use testvm::vm::GuestFile;

use super::super::measurement::{Environment, Measurements};
use super::super::outcome::Args;
use super::super::plot::Plot;
use super::super::threshold::{self, Threshold};
use super::super::{guest, here};
use crate::builds::{self, ProgramProfile};

/// The rows of `loopfs/benches/loop/losetup.rs`.
const UTIL_LINUX: &str = "losetup_j_util_linux";
const FIRST: &str = "losetup_j_drop_in_first";
const AFTER_UEVENT: &str = "losetup_j_drop_in_after_uevent";
const UNCHANGED: &str = "losetup_j_drop_in";

pub(super) const PLOT: Plot =
    Plot::new("losetup -j", "devices attached", &[UTIL_LINUX, FIRST, AFTER_UEVENT, UNCHANGED]);

/// The variable of the measuring program with the path of this project's losetup, and that path in a guest.
const DROP_IN: (&str, &str) = ("LOOPFS_BENCH_DROP_IN", "/tests/programs/losetup");

/// Measures on this machine, or in a virtual machine if this one has no loop devices or a kernel is given.
pub(super) async fn run(session: &Session, args: &Args) -> Result<Environment> {
    let program = session.until_cancelled(rust_build::bench(session, "loopfs", "loop")).await?;
    let tool = session.until_cancelled(builds::loopfs_tool(session, ProgramProfile::Release)).await?;
    if here::has_loop_devices() && args.kernel.is_none() {
        // The tool is losetup if it is called by that name.
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let losetup = directory.path().join("losetup");
        std::os::unix::fs::symlink(&tool, &losetup)
            .with_context(|| format!("create {}", losetup.display()))?;
        let files = here::files(session, args)?;
        let args = args.of_program(&["losetup", &files.display().to_string()]);
        return here::run(session, &program, args, &[(DROP_IN.0, OsString::from(losetup))]).await;
    }
    let mut beside = vec![GuestFile { path: DROP_IN.1.to_owned(), mode: 0o755, host: tool }];
    for (path, host) in session.until_cancelled(LOSETUP.files(session)).await? {
        beside.push(GuestFile { path, mode: 0o755, host });
    }
    let runs = [args.of_program(&["losetup", guest::XFS])];
    let parts = guest::run(session, args.kernel.as_deref(), &program, beside, &runs, guest::DISK_MIB).await?;
    parts.into_iter().next().context("the virtual machine measured nothing")
}

pub(super) fn thresholds(all: &Measurements) -> Vec<Threshold> {
    let most = all.counts(UTIL_LINUX).last().copied().unwrap_or_default();
    let threshold = |state: &str, row: &str| {
        let text = format!("losetup -j, {most} devices, {state}: 20 times as fast as util-linux");
        threshold::faster(all, &text, (row, most), 20.0, (UTIL_LINUX, most))
    };
    vec![
        threshold("no uevent since the last call", UNCHANGED).with_cause(
            "before Linux 6.15 attaching a file need not send a uevent, so losetup -j always checks one inode of each device",
        ),
        threshold("a uevent since the last call", AFTER_UEVENT).with_cause(
            "after a uevent losetup -j checks one inode of each device, because no call of the kernel shows which devices were attached since",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::super::measurement::Row;
    use super::*;

    #[test]
    fn the_thresholds_are_those_of_the_largest_count() {
        let row = |name: &str, n, value| Row::of(name, n, "us", [value]).unwrap();
        let all = Measurements::of(vec![
            row(UTIL_LINUX, 10, 1.0),
            row(UNCHANGED, 10, 1.0),
            row(UTIL_LINUX, 4000, 200.0),
            row(UNCHANGED, 4000, 10.0),
            row(AFTER_UEVENT, 4000, 10.1),
        ]);
        let verdicts: Vec<_> = thresholds(&all).into_iter().map(|threshold| threshold.is_met).collect();
        assert_eq!(verdicts, [Some(true), Some(false)]);
    }
}
