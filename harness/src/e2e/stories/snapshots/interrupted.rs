//! csi-snapshotter is killed after the creation and the deletion of a snapshot were requested, and before the driver has
//! responded: the driver is frozen until csi-snapshotter is dead.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::containers::{Container, freeze, thaw};
use testvm_cluster::{Node, objects};

use super::names::{SIZE, snapshots_on};
use crate::e2e::stories::outages::until_bound;
use crate::test_env::disturbances::{kill, until_replaced};
use crate::test_env::environment::TestEnv;
use crate::test_env::snapshots::{IN_CREATION, IN_DELETION, contents, snapshots};
use crate::test_env::workload::VolumeMode;
use crate::test_env::{claims, snapshots};

/// The containers of the manifests.
const DRIVER: &str = "csi";
const SNAPSHOTTER: &str = "csi-snapshotter";
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
            env,
            contents(env),
            &content,
            "csi-snapshotter does not request the snapshot",
            |content| content.annotations().contains_key(IN_CREATION),
        )
        .await
    };
    Box::pin(kill_while_frozen(env, node, requested)).await?;
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
        snapshots::until(env, contents(env), &content, "snapshot-controller does not delete it", |content| {
            content.metadata.deletion_timestamp.is_some() && content.annotations().contains_key(IN_DELETION)
        })
        .await
    };
    Box::pin(kill_while_frozen(env, node, requested)).await?;
    objects::until_gone(snapshots(env), SNAPSHOT, env.timeouts.end).await?;
    objects::until_gone(contents(env), &content, env.timeouts.end).await?;
    let left = snapshots_on(node).await?;
    anyhow::ensure!(left.is_empty(), "the node still has the snapshots {left:?}");
    Ok(())
}

/// Freezes the driver, awaits `requested`, and kills csi-snapshotter. Then the driver continues, and the kubelet restarts
/// csi-snapshotter.
async fn kill_while_frozen(
    env: &TestEnv<'_>,
    node: &Node,
    requested: impl Future<Output = Result<()>>,
) -> Result<()> {
    let pod = driver_pod(env).await?;
    let driver = Container::of(&pod, DRIVER)?;
    freeze(node, &driver).await?;
    let killed = async {
        requested.await?;
        kill(env, node, &pod, SNAPSHOTTER).await
    };
    let killed = killed.await;
    // Other stories need the driver, so it goes on after a failure, too. The first error has the cause: if it took long, the
    // kubelet has restarted the frozen driver.
    let thawed = thaw(node, &driver).await;
    let snapshotter = killed.and_then(|killed| thawed.map(|()| killed))?;
    until_replaced(env, &[snapshotter]).await
}

async fn driver_pod(env: &TestEnv<'_>) -> Result<Pod> {
    env.live_driver_pods().await?.into_iter().next().context("the driver has no pod")
}
