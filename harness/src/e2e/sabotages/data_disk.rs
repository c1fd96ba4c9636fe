//! Changes of the data disk of the node, which the driver must refuse to use.

use std::time::Duration;

use anyhow::{Context, Result};
use testvm_cluster::Node;

use crate::e2e::parts::node_without_storage::{data_disk, mount_disk, reports_storage};
use crate::e2e::stories::install;
use crate::nodes::{DATA_DIR, DATA_OPTIONS};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::is_mounted;

const TOOL_DEADLINE: Duration = Duration::from_secs(60);

/// What the driver reports of each change.
pub(super) const WITHOUT_QUOTA: &[&str] = &["prjquota", DATA_DIR];
pub(super) const UNMOUNTED: &[&str] = &["nothing is mounted", DATA_DIR];
pub(super) const REPLACED: &[&str] = &["was initialised on file system", DATA_DIR];

/// Mounts the data disk without project quotas.
pub(super) async fn mount_without_quota(env: &TestEnv<'_>) -> Result<()> {
    let node = stopped(env).await?;
    let device = data_disk(node).await?;
    let argv = ["mount", "-t", "xfs", "-o", "noquota,nodev,nosuid,noexec", &device, DATA_DIR];
    node.output(&argv, TOOL_DEADLINE).await?;
    reported(env, node, WITHOUT_QUOTA).await
}

pub(super) async fn unmount_disk(env: &TestEnv<'_>) -> Result<()> {
    let node = stopped(env).await?;
    reported(env, node, UNMOUNTED).await
}

/// Replaces the file system that the driver has initialised by a new, empty one.
pub(super) async fn replace_disk(env: &TestEnv<'_>) -> Result<()> {
    env.manifests.apply(&env.client).await?;
    install::served(env).await?;
    let node = stopped(env).await?;
    let device = data_disk(node).await?;
    node.output(&["mkfs.xfs", "-q", "-f", &device], TOOL_DEADLINE).await?;
    let argv = ["mount", "-t", "xfs", "-o", DATA_OPTIONS, &device, DATA_DIR];
    node.output(&argv, TOOL_DEADLINE).await?;
    reported(env, node, REPLACED).await
}

/// Mounts the disk as the driver needs it. The driver is stopped, so that it does not report the unmounted disk, which is another
/// sabotage.
pub(super) async fn mount_properly(env: &TestEnv<'_>) -> Result<()> {
    mount_disk(stopped(env).await?).await
}

/// Removes the record of the initialised file system, as an administrator who replaces the disk does.
pub(super) async fn forget_identity(env: &TestEnv<'_>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    node.output(&["rm", &format!("{DATA_DIR}.filesystem-uuid")], TOOL_DEADLINE).await.map(drop)
}

/// Stops the driver, unmounts the disk, and returns the node. The mount point stays.
async fn stopped<'a>(env: &TestEnv<'a>) -> Result<&'a Node> {
    install::stop(env).await?;
    let node = env.node.context(FOREIGN_NODE)?;
    if is_mounted(node, DATA_DIR).await? {
        node.output(&["umount", DATA_DIR], TOOL_DEADLINE).await?;
    }
    Ok(node)
}

/// Starts the driver, and waits for its event on the Node. The state does not change any more after it.
async fn reported(env: &TestEnv<'_>, node: &Node, words: &[&str]) -> Result<()> {
    env.manifests.apply(&env.client).await?;
    reports_storage(env, node, words).await?;
    env.timeouts.shorten();
    Ok(())
}
