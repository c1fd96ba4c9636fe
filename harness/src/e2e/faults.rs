//! Things broken on purpose, to see that the run fails and says why.
//!
//! A test that cannot fail proves nothing: `--break` breaks one thing in a run that then must fail, and
//! `--self-check` breaks each in turn and passes only if each was noticed for its own reason.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::cluster::{DATA_DIR, DATA_OPTIONS, Node};
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::is_mounted;

const TOOL_DEADLINE: Duration = Duration::from_secs(60);

/// What can be broken.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(crate) enum Fault {
    /// The data file system is mounted without project quotas.
    Quota,
    /// The data file system is not mounted at all.
    NoDisk,
    /// Another file system is mounted in place of the one that was initialised.
    WrongDisk,
    /// The pod can write to the volume it is told is read-only.
    Readonly,
    /// The driver stops before the claims grow.
    Resize,
    /// What is written before the power is cut is not synced.
    Unsynced,
    /// A loop device stays attached to a volume.
    Leak,
}

/// What a self-check breaks, in an order in which each can be repaired before the next.
pub(super) const ALL: [Fault; 7] = [
    Fault::Quota,
    Fault::NoDisk,
    Fault::WrongDisk,
    Fault::Readonly,
    Fault::Resize,
    Fault::Leak,
    Fault::Unsynced,
];

impl Fault {
    /// As on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Fault::Quota => "quota",
            Fault::NoDisk => "no-disk",
            Fault::WrongDisk => "wrong-disk",
            Fault::Readonly => "readonly",
            Fault::Resize => "resize",
            Fault::Unsynced => "unsynced",
            Fault::Leak => "leak",
        }
    }

    /// What the failure must say, so that its reader knows what to repair.
    pub(super) fn expected_in_failure(self) -> &'static [&'static str] {
        match self {
            Fault::Quota => &["prjquota", DATA_DIR],
            Fault::NoDisk => &["nothing is mounted", DATA_DIR],
            Fault::WrongDisk => &["was initialised on file system", DATA_DIR],
            Fault::Readonly => &["a write was allowed on the read-only volume", "/vol/readonly"],
            Fault::Resize => &["has not grown", "4Mi asked", "it has 1Mi"],
            Fault::Unsynced => &["is not what was written", "/vol/power-cut-0-0"],
            Fault::Leak => &["leaked", "loop device"],
        }
    }
}

/// The block device behind the data directory, which must be known before it is unmounted.
pub(super) async fn data_device(node: &Node) -> Result<String> {
    let argv = ["findmnt", "--noheadings", "--output", "SOURCE", "--mountpoint", DATA_DIR];
    let device = node.output(&argv, TOOL_DEADLINE).await.context("find the device of the data directory")?;
    Ok(device.trim().to_owned())
}

/// Mounts the data file system with other options than it needs.
pub(super) async fn mount_without_quota(node: &Node, device: &str) -> Result<()> {
    unmount(node).await?;
    mount(node, device, "noquota,nodev,nosuid,noexec").await
}

/// Takes the data file system away; the directory it was mounted on stays.
pub(super) async fn unmount(node: &Node) -> Result<()> {
    if is_mounted(node, DATA_DIR).await? {
        node.output(&["umount", DATA_DIR], TOOL_DEADLINE).await?;
    }
    Ok(())
}

/// Puts a new, empty file system where the driver's was.
pub(super) async fn replace(node: &Node, device: &str) -> Result<()> {
    unmount(node).await?;
    node.output(&["mkfs.xfs", "-q", "-f", device], TOOL_DEADLINE).await?;
    mount(node, device, DATA_OPTIONS).await
}

/// Mounts the data file system as the driver needs it.
pub(super) async fn mount_properly(node: &Node, device: &str) -> Result<()> {
    unmount(node).await?;
    mount(node, device, DATA_OPTIONS).await
}

/// Removes the record of the file system that was initialised, as an operator who means it would.
pub(super) async fn forget_identity(node: &Node) -> Result<()> {
    node.output(&["rm", &format!("{DATA_DIR}.filesystem-uuid")], TOOL_DEADLINE).await.map(drop)
}

/// Attaches a loop device to the image of a block volume, as a driver that forgot one would. It is read-only, because the
/// driver finds a writable device of any program and detaches it with its own.
pub(super) async fn leak_loop_device(env: &TestEnv<'_>) -> Result<String> {
    let node = env.node.context("a loop device can be leaked only on a node of ours")?;
    // Whatever the layout: an image is a regular file of a volume's size below the data directory.
    let argv = ["find", DATA_DIR, "-type", "f", "-size", "+1023k", "-print", "-quit"];
    let image = node.output(&argv, TOOL_DEADLINE).await?;
    let image = image.trim();
    anyhow::ensure!(!image.is_empty(), "no image of a block volume is in {DATA_DIR}");
    let device = node.output(&["losetup", "--read-only", "--find", "--show", image], TOOL_DEADLINE).await?;
    Ok(device.trim().to_owned())
}

/// Undoes [`leak_loop_device`].
pub(super) async fn detach(node: &Node, device: &str) -> Result<()> {
    node.output(&["losetup", "--detach", device], TOOL_DEADLINE).await.map(drop)
}

async fn mount(node: &Node, device: &str, options: &str) -> Result<()> {
    let argv = ["mount", "-t", "xfs", "-o", options, device, DATA_DIR];
    node.output(&argv, TOOL_DEADLINE).await.map(drop)
}
