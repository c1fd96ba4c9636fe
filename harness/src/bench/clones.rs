//! `bench clone`: copies that share blocks, of images and of directory trees.

use anyhow::Result;
use testvm::rust_build;
use testvm::session::Session;

use super::guest;
use super::measurement::Measurements;
use super::outcome::{Args, Outcome};
use super::plot::Plot;
use super::threshold::{self, Threshold};

/// The size of the disk. It has an image of 8 GiB, its clone and its snapshot, and each reserves its full
/// size. 8 GiB are written.
const DISK_MIB: u64 = 32 << 10;

const PLOTS: [Plot; 2] = [
    Plot::new("Clone or snapshot an image", "MiB", &["clone_image", "snapshot_image"]),
    Plot::new("Copy a tree, each inode", "files", &["clone_tree", "read_and_write", "cp_reflink"]),
];

pub(super) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let program = session.until_cancelled(rust_build::bench(session, "loopfs", "clone")).await?;
    let runs = ["images", "trees"].map(|kind| args.of_program(&[kind, guest::XFS]));
    let disk_mib = if args.quick { guest::DISK_MIB } else { DISK_MIB };
    let parts = guest::run(session, args.kernel.as_deref(), &program, Vec::new(), &runs, disk_mib).await?;
    Ok(Outcome::new(parts, thresholds, &PLOTS))
}

fn thresholds(all: &Measurements) -> Vec<Threshold> {
    let mut thresholds = vec![
        threshold::flat(all, "cloning an image: within twice the time at any size", "clone_image", 2.0),
        threshold::flat(
            all,
            "a snapshot of an image: within twice the time at any size",
            "snapshot_image",
            2.0,
        ),
        threshold::flat(all, "cloning a tree: within twice the time for each inode", "clone_tree", 2.0),
    ];
    for n in all.counts("clone_tree") {
        let text = format!(
            "cloning a tree of {n} files: at most twice the time of a copy that reads and writes, and preserves less"
        );
        thresholds.push(threshold::at_most(all, &text, ("clone_tree", n), 2.0, ("read_and_write", n)));
    }
    thresholds
}
