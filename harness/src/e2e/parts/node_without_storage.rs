//! A node that never had a data file system: its pod of the driver must be available, or it would stop a rollout to the nodes that have
//! one. Once a file system is mounted there, the driver serves it without a restart.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::{Api, ResourceExt};
use testvm::steps::{StepResult, Steps};
use testvm_cluster::workload::node_of;
use testvm_cluster::{Node, objects};

use super::full_node::largest;
use super::serving::{rolled_out, serves};
use crate::nodes::{DATA_DIR, DATA_OPTIONS};
use crate::test_env::environment::TestEnv;
use crate::test_env::node_debug;

pub(in crate::e2e) async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    let available = rolled_out(env, None, 2);
    steps.step("the driver's pods are available on both nodes, as a rollout requires", available).await?;
    let title = "the driver is not registered there and publishes no free capacity";
    steps.step(title, unused(env, node)).await?;
    let title = "a file system is mounted there, and the driver serves it as it runs";
    steps.step(title, arrives(env, node)).await
}

async fn unused(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let is_registered = node_debug::is_met(node, &["plugin-registered"]).await?;
    anyhow::ensure!(!is_registered, "the driver is registered");
    let published: Api<CSIStorageCapacity> = Api::all(env.client.clone());
    let published = objects::list(&published, "").await?;
    let capacity = largest(env, node, published.iter());
    anyhow::ensure!(capacity.is_none_or(|capacity| capacity.0 == "0"), "{capacity:?} is published");
    Ok(())
}

async fn arrives(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let before = driver_pod(env, node).await?;
    mount_disk(node).await?;
    serves(env, 2).await?;
    let after = driver_pod(env, node).await?;
    anyhow::ensure!(before.uid() == after.uid(), "the driver's pod was replaced");
    let statuses = after.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let restarts: i32 = statuses.map(|status| status.restart_count).sum();
    anyhow::ensure!(restarts == 0, "the driver's containers were restarted {restarts} times");
    Ok(())
}

/// Returns the path of the node's data disk.
pub(in crate::e2e) async fn data_disk(node: &Node) -> Result<String> {
    let device = node.output(&["blkid", "--match-token", "TYPE=xfs", "--output", "device"]);
    Ok(device.await.context("find the data disk")?.trim().to_owned())
}

/// Mounts the node's data disk.
pub(in crate::e2e) async fn mount_disk(node: &Node) -> Result<()> {
    let device = data_disk(node).await?;
    node.output(&["mkdir", "--parents", DATA_DIR]).await?;
    let mount = ["mount", "-t", "xfs", "-o", DATA_OPTIONS, &device, DATA_DIR];
    node.output(&mount).await.map(drop)
}

/// Returns the driver's pod on a node.
pub(in crate::e2e) async fn driver_pod(env: &TestEnv<'_>, node: &Node) -> Result<Pod> {
    let pods = env.live_driver_pods().await?;
    let on_node = |pod: &Pod| node_of(pod) == Some(node.name());
    pods.into_iter().find(on_node).with_context(|| format!("the driver has no pod on {}", node.name()))
}
