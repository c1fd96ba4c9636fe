//! csi-snapshotter is killed after the creation and the deletion of a snapshot were requested, and before the driver has
//! responded: the driver is frozen until csi-snapshotter is dead.

use std::collections::BTreeSet;

use anyhow::Result;
use kube::ResourceExt;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Node, objects};

use super::names::{SIZE, snapshots_on};
use crate::e2e::stories::outages::until_bound;
use crate::test_env::disturbances::{REQUEST_LIMIT, kill_while_frozen, until_replaced};
use crate::test_env::environment::TestEnv;
use crate::test_env::snapshots::{IN_CREATION, IN_DELETION, contents, snapshots};
use crate::test_env::workload::VolumeMode;
use crate::test_env::{claims, snapshots};

const CLAIM: &str = "interrupted";
const SNAPSHOT: &str = "interrupted";

pub(super) async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    let title = "csi-snapshotter is killed before the driver has taken a snapshot, and the node has one";
    steps.step(title, create(env, node)).await?;
    let title = "csi-snapshotter is killed before the driver has deleted the snapshot, and the node has none";
    steps.step(title, delete(env, node)).await
}

async fn create(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    claims::request_on(env, node.name(), CLAIM, SIZE, VolumeMode::Block).await?;
    until_bound(env, &BTreeSet::from([CLAIM.to_owned()]), 1).await?;
    let requested = async {
        snapshots::request(env, SNAPSHOT, CLAIM, None).await?;
        let content = snapshots::content_name(env, SNAPSHOT).await?;
        snapshots::until(
            contents(env),
            &content,
            REQUEST_LIMIT,
            "csi-snapshotter does not request the snapshot",
            |content| content.annotations().contains_key(IN_CREATION),
        )
        .await
    };
    Box::pin(kill_snapshotter(env, node, requested)).await?;
    let content = snapshots::ready(env, SNAPSHOT).await?;
    let handle = snapshots::text(&content, "/status/snapshotHandle")?;
    let taken = snapshots_on(node).await?;
    anyhow::ensure!(taken == [handle], "the node has the snapshots {taken:?}, not only {handle}");
    Ok(())
}

async fn delete(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let content = snapshots::content_name(env, SNAPSHOT).await?;
    let requested = async {
        objects::delete(&snapshots(env), SNAPSHOT).await?;
        snapshots::until(
            contents(env),
            &content,
            REQUEST_LIMIT,
            "snapshot-controller does not delete it",
            |content| {
                content.metadata.deletion_timestamp.is_some()
                    && content.annotations().contains_key(IN_DELETION)
            },
        )
        .await
    };
    Box::pin(kill_snapshotter(env, node, requested)).await?;
    objects::until_gone(snapshots(env), SNAPSHOT, env.timeouts.end).await?;
    objects::until_gone(contents(env), &content, env.timeouts.end).await?;
    let left = snapshots_on(node).await?;
    anyhow::ensure!(left.is_empty(), "the node still has the snapshots {left:?}");
    Ok(())
}

/// Kills csi-snapshotter, and waits until the kubelet has started it again.
async fn kill_snapshotter(
    env: &TestEnv<'_>,
    node: &Node,
    requested: impl Future<Output = Result<()>>,
) -> Result<()> {
    let killed = kill_while_frozen(env, node, requested, &["csi-snapshotter"]).await?;
    until_replaced(env, &killed).await
}
