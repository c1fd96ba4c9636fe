//! Fault injection: checks that a run with a fault fails and names it.
//!
//! A test that cannot fail proves nothing. `--break` injects one fault into a run, which must fail. `--self-check` injects each fault
//! in turn, and passes only if each failure names its fault.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::runtime::watcher;
use testvm_cluster::Node;
use testvm_cluster::containers::{kill_in, until_replaced};

use crate::nodes::{DATA_DIR, DATA_OPTIONS};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::is_mounted;

const TOOL_DEADLINE: Duration = Duration::from_secs(60);

/// A fault that `--break` injects.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(crate) enum Fault {
    /// The data file system is mounted without project quotas.
    Quota,
    /// The data file system is not mounted at all.
    NoDisk,
    /// Another file system is mounted in place of the one that was initialised.
    WrongDisk,
    /// The pod can write to the volume that its arguments call read-only.
    Readonly,
    /// The driver stops before the claims are expanded.
    Resize,
    /// The data written before the power cut is not synced.
    Unsynced,
    /// A loop device stays attached to a volume, and a project id with a limit, a mount and a file are left, too.
    Leak,
    /// A container of the driver is killed, which the story does not declare.
    Restart,
}

/// The faults of a self-check, in an order in which each can be repaired before the next.
pub(super) const ALL: [Fault; 8] = [
    Fault::Quota,
    Fault::NoDisk,
    Fault::WrongDisk,
    Fault::Readonly,
    Fault::Resize,
    Fault::Leak,
    Fault::Restart,
    Fault::Unsynced,
];

impl Fault {
    /// Returns the value of `--break`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Fault::Quota => "quota",
            Fault::NoDisk => "no-disk",
            Fault::WrongDisk => "wrong-disk",
            Fault::Readonly => "readonly",
            Fault::Resize => "resize",
            Fault::Unsynced => "unsynced",
            Fault::Leak => "leak",
            Fault::Restart => "restart",
        }
    }

    /// Returns the words that the failure must contain, so that its reader knows what to repair.
    pub(super) fn expected_in_failure(self) -> &'static [&'static str] {
        match self {
            Fault::Quota => &["prjquota", DATA_DIR],
            Fault::NoDisk => &["nothing is mounted", DATA_DIR],
            Fault::WrongDisk => &["was initialised on file system", DATA_DIR],
            Fault::Readonly => &["a write was allowed on the read-only volume", "/vol/readonly"],
            Fault::Resize => &["has not grown", "4Mi asked", "it has 1Mi"],
            Fault::Unsynced => &["is not what was written", "/vol/power-cut-0-0"],
            Fault::Leak => &[
                "leaked",
                "loop device attached to",
                "project id 4242 with a limit of 1024 blocks",
                "mount of /leaked at",
                "/leaked/file",
            ],
            Fault::Restart => {
                &["container csi of pod", "restarted, which the test did not cause", "exit code 137"]
            }
        }
    }
}

/// Returns the block device of the data file system, which has to be mounted.
pub(super) async fn data_device(node: &Node) -> Result<String> {
    let argv = ["findmnt", "--noheadings", "--output", "SOURCE", "--mountpoint", DATA_DIR];
    let device = node.output(&argv, TOOL_DEADLINE).await.context("find the device of the data directory")?;
    Ok(device.trim().to_owned())
}

/// Mounts the data file system without project quotas.
pub(super) async fn mount_without_quota(node: &Node, device: &str) -> Result<()> {
    unmount(node).await?;
    mount(node, device, "noquota,nodev,nosuid,noexec").await
}

/// Unmounts the data file system. The mount point stays.
pub(super) async fn unmount(node: &Node) -> Result<()> {
    if is_mounted(node, DATA_DIR).await? {
        node.output(&["umount", DATA_DIR], TOOL_DEADLINE).await?;
    }
    Ok(())
}

/// Replaces the data file system by a new, empty one.
pub(super) async fn replace(node: &Node, device: &str) -> Result<()> {
    unmount(node).await?;
    node.output(&["mkfs.xfs", "-q", "-f", device], TOOL_DEADLINE).await?;
    mount(node, device, DATA_OPTIONS).await
}

/// Mounts the data file system with the options that the driver needs.
pub(super) async fn mount_properly(node: &Node, device: &str) -> Result<()> {
    unmount(node).await?;
    mount(node, device, DATA_OPTIONS).await
}

/// Removes the record of the initialised file system, as an administrator who replaces the disk does.
pub(super) async fn forget_identity(node: &Node) -> Result<()> {
    node.output(&["rm", &format!("{DATA_DIR}.filesystem-uuid")], TOOL_DEADLINE).await.map(drop)
}

/// Leaves one object of each kind that an [`Inventory`](crate::test_env::inventory::Inventory) has, and returns the loop device.
pub(super) async fn leak(env: &TestEnv<'_>) -> Result<String> {
    let node = env.node.context(FOREIGN_NODE)?;
    let device = leak_loop_device(node).await?;
    node.output(&["sh", "-exc", &LEAK.replace("DATA", DATA_DIR)], TOOL_DEADLINE).await?;
    Ok(device)
}

/// The project id is not one of the store or of the kubelet, which would free theirs.
const LEAK: &str = "mkdir -p DATA/leaked /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
echo leaked > DATA/leaked/file
mount --bind DATA/leaked /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
xfs_quota -x -c 'limit -p bhard=1m 4242' DATA";

/// Removes what [`LEAK`] leaves.
const REMOVE_LEAK: &str = "umount /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
rmdir /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
rm -r DATA/leaked
xfs_quota -x -c 'limit -p bhard=0 4242' DATA";

/// Attaches a loop device to the image of a block volume, and returns its path. The device is read-only, because the driver also
/// finds the writable devices of other programs and detaches them with its own.
async fn leak_loop_device(node: &Node) -> Result<String> {
    // Independent of the layout: an image is a regular file of a volume's size below the data directory.
    let argv = ["find", DATA_DIR, "-type", "f", "-size", "+1023k", "-print", "-quit"];
    let image = node.output(&argv, TOOL_DEADLINE).await?;
    let image = image.trim();
    anyhow::ensure!(!image.is_empty(), "no image of a block volume is in {DATA_DIR}");
    let device = node.output(&["losetup", "--read-only", "--find", "--show", image], TOOL_DEADLINE).await?;
    Ok(device.trim().to_owned())
}

/// Removes what [`leak`] left. `device` is the loop device.
pub(super) async fn remove_leak(node: &Node, device: &str) -> Result<()> {
    node.output(&["losetup", "--detach", device], TOOL_DEADLINE).await?;
    node.output(&["sh", "-exc", &REMOVE_LEAK.replace("DATA", DATA_DIR)], TOOL_DEADLINE).await.map(drop)
}

/// Kills the csi container of the driver without a declaration, and waits until another runs in its place.
pub(super) async fn kill_undeclared(env: &TestEnv<'_>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    let killed = kill_in(node, &env.driver_pods(), env.driver.pod_labels(), "csi").await?;
    let scope = watcher::Config::default().labels(env.driver.pod_labels());
    until_replaced(env.driver_pods(), scope, &[killed], env.timeouts.start).await
}

async fn mount(node: &Node, device: &str, options: &str) -> Result<()> {
    let argv = ["mount", "-t", "xfs", "-o", options, device, DATA_DIR];
    node.output(&argv, TOOL_DEADLINE).await.map(drop)
}
