//! csi-snapshotter is killed while it waits for the driver to create a snapshot, and to delete it. The driver is frozen in the
//! meantime, so that no timing is involved.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use testvm_cluster::Node;
use testvm_cluster::containers::{Container, freeze, kill, thaw};

use super::names::{SIZE, snapshots_added_since};
use crate::e2e::scenario::{Scenario, StepResult};
use crate::e2e::scenarios::outages::until_bound;
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;
use crate::test_env::snapshots::{IN_CREATION, IN_DELETION};
use crate::test_env::workload::{VolumeMode, claim};
use crate::test_env::{claims, snapshots};

/// The containers of the manifests.
const DRIVER: &str = "csi";
const SNAPSHOTTER: &str = "csi-snapshotter";
const CLAIM: &str = "interrupted";
const SNAPSHOT: &str = "interrupted";

pub(super) async fn run(scenario: &mut Scenario<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    let before = scenario.step("list the snapshots on the node", Inventory::take(node)).await?;
    scenario
        .step(
            "csi-snapshotter is killed while it creates a snapshot, and there is one snapshot",
            create(env, node, &before),
        )
        .await?;
    scenario
        .step(
            "csi-snapshotter is killed while it deletes the snapshot, and there is none",
            delete(env, node, &before),
        )
        .await
}

async fn create(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<()> {
    let object = claim(CLAIM, &env.driver.class_name(), SIZE, VolumeMode::Block, "ReadWriteOnce")?;
    claims::create(env, &claims::with_selected_node(object, node.name())).await?;
    until_bound(env, &BTreeSet::from([CLAIM.to_owned()]), 1).await?;
    let requested = async {
        snapshots::request(env, SNAPSHOT, CLAIM, None).await?;
        let content = snapshots::content_name(env, SNAPSHOT).await?;
        snapshots::until_content(env, &content, "csi-snapshotter does not request the snapshot", |content| {
            content.annotations().contains_key(IN_CREATION)
        })
        .await
    };
    kill_while_frozen(env, node, requested).await?;
    let content = snapshots::ready(env, SNAPSHOT).await?;
    let handle = snapshots::text(&content, "/status/snapshotHandle")?;
    let taken = snapshots_added_since(node, before).await?;
    anyhow::ensure!(taken == [handle], "the node has the snapshots {taken:?}, not only {handle}");
    Ok(())
}

async fn delete(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<()> {
    let content = snapshots::content_name(env, SNAPSHOT).await?;
    let requested = async {
        snapshots::delete_snapshot(env, SNAPSHOT).await?;
        snapshots::until_content(env, &content, "its deletion is not requested", |content| {
            content.metadata.deletion_timestamp.is_some() && content.annotations().contains_key(IN_DELETION)
        })
        .await
    };
    kill_while_frozen(env, node, requested).await?;
    snapshots::snapshot_gone(env, SNAPSHOT).await?;
    snapshots::content_gone(env, &content).await?;
    let left = snapshots_added_since(node, before).await?;
    anyhow::ensure!(left.is_empty(), "the node still has the snapshots {left:?}");
    let volume = claims::volume_of(env, CLAIM).await?.name_any();
    claims::delete(env, CLAIM).await?;
    claims::gone(env, &volume).await
}

/// Freezes the driver, awaits `requested`, and kills csi-snapshotter. Then the driver goes on, and the kubelet restarts
/// csi-snapshotter.
async fn kill_while_frozen(
    env: &TestEnv<'_>,
    node: &Node,
    requested: impl Future<Output = Result<()>>,
) -> Result<()> {
    let pod = driver_pod(env).await?;
    let (driver, snapshotter) = (Container::of(&pod, DRIVER)?, Container::of(&pod, SNAPSHOTTER)?);
    freeze(node, &driver).await?;
    let killed = async {
        requested.await?;
        kill(node, &snapshotter).await
    };
    let killed = killed.await;
    // Also after a failure: other scenarios need the driver.
    thaw(node, &driver).await?;
    killed
}

async fn driver_pod(env: &TestEnv<'_>) -> Result<Pod> {
    env.live_driver_pods().await?.into_iter().next().context("the driver has no pod")
}
