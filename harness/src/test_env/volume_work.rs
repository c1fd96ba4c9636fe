//! The work of a node for volumes, as its kernel shows it: bound loop devices, and the programs that the kubelet started.

use std::collections::BTreeSet;

use anyhow::Result;
use testvm_cluster::Node;
use testvm_cluster::started_programs::StartedProgram;

/// The programs that a stock kubelet starts for volumes, if the node has them.
pub(crate) const VOLUME_PROGRAMS: [&str; 6] =
    ["mount", "umount", "losetup", "systemd-run", "xfs_quota", "du"];
/// The name of the kubelet's process.
pub(crate) const KUBELET: &str = "kubelet";

/// Returns those programs of `started` that the kubelet started for volumes.
pub(crate) fn by_kubelet_for_volumes(started: &[StartedProgram]) -> impl Iterator<Item = &StartedProgram> {
    started.iter().filter(|program| program.by == KUBELET && VOLUME_PROGRAMS.contains(&program.name()))
}

/// Returns the loop devices that are bound to a file, each with the path of that file.
pub(crate) async fn loop_devices(node: &Node) -> Result<BTreeSet<String>> {
    let list = "for device in /sys/block/loop*/loop; do \
                if read -r file 2>/dev/null < \"$device/backing_file\"; then echo \"$device $file\"; fi; done";
    let output = node.output(&["sh", "-c", list]).await?;
    Ok(output.lines().map(str::to_owned).collect())
}
