//! A second node joins, first without storage and then with it. It gets the volumes for which the first node
//! has no space, and leaves.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt};
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::api_error::api_error;
use testvm_cluster::workload::node_of;
use testvm_cluster::{Cluster, DataDisk, Node, objects};

use super::removal;
use crate::e2e::parts::serving;
use crate::e2e::parts::{full_node, node_without_storage};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};

pub(in crate::e2e) const STORY: Story = Story {
    name: "second-node",
    about: "a second node joins, gets volumes, and leaves; a claim that names a deleted node gets another",
    when: When::All,
    run: Run::OwnNode(|steps, state, cluster, node| Box::pin(run(steps, state.env, cluster, node))),
    sabotages: &[Sabotage {
        name: "capacity",
        about: "A node without storage has capacity",
        before: "the driver is not registered there and publishes no free capacity",
        change: |env| Box::pin(publish_capacity(env)),
        repair: Some(|env| Box::pin(remove_other_nodes(env))),
        expected: &["is published"],
    }],
};

pub(super) const INDEX: u8 = 1;

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, cluster: &Cluster, first: &Node) -> StepResult {
    let booted = cluster.boot_node(steps.session(), INDEX, DataDisk::Unmounted);
    let second = steps.step("boot a second node without a data file system", booted).await?;
    node_without_storage::run(steps, env, &second).await?;
    full_node::run(steps, env, first, &second).await?;
    steps.step("pods and claims are deleted", removal::delete_objects(env)).await?;
    steps.step("the second node leaves", leave(env, second)).await
}

/// Removes the node as an administrator does, with its pods' objects, because no kubelet reports their end.
pub(super) async fn leave(env: &TestEnv<'_>, node: Node) -> Result<()> {
    let name = node.name().to_owned();
    node.stop().await?;
    delete(env, &name).await?;
    serving::serves(env, 1).await
}

/// Deletes the object of a stopped node, and those of its pods of the driver.
pub(super) async fn delete(env: &TestEnv<'_>, name: &str) -> Result<()> {
    let nodes: Api<NodeObject> = Api::all(env.client.clone());
    objects::delete(&nodes, name).await?;
    for pod in env.live_driver_pods().await? {
        if node_of(&pod) == Some(name) {
            env.caused.replace([&pod]);
            let forced = DeleteParams::default().grace_period(0);
            let deleted = env.driver_pods().delete(&pod.name_any(), &forced).await;
            deleted.map_err(api_error).context("delete the driver's pod")?;
        }
    }
    Ok(())
}

/// Has an object say that the second node, which has no storage, has some.
async fn publish_capacity(env: &TestEnv<'_>) -> Result<()> {
    let second = other_nodes(env).await?.pop().context("there is no second node")?;
    let capacity: CSIStorageCapacity = serde_json::from_value(json!({
        "metadata": {"name": "sabotage"},
        "storageClassName": env.driver.class_name(),
        "nodeTopology": {"matchLabels": {"node": second}},
        "capacity": "1Gi",
        "maximumVolumeSize": "1Gi",
    }))?;
    let capacities = Api::namespaced(env.client.clone(), &env.namespace);
    objects::create(&capacities, &capacity).await.map(drop)
}

/// Removes the nodes that the story has stopped.
async fn remove_other_nodes(env: &TestEnv<'_>) -> Result<()> {
    for name in other_nodes(env).await? {
        delete(env, &name).await?;
    }
    Ok(())
}

/// Returns the names of all nodes but the first.
async fn other_nodes(env: &TestEnv<'_>) -> Result<Vec<String>> {
    let first = env.node.context(FOREIGN_NODE)?.name();
    let nodes: Api<NodeObject> = Api::all(env.client.clone());
    let nodes = objects::list(&nodes, "").await?;
    Ok(nodes.iter().map(ResourceExt::name_any).filter(|name| name != first).collect())
}
