//! A second node joins, first without storage and then with it. It gets the volumes for which the first node
//! has no space, and leaves.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt};
use testvm::steps::{StepResult, Steps};
use testvm_cluster::api_error::api_error;
use testvm_cluster::waiting::until_event;
use testvm_cluster::workload::node_of;
use testvm_cluster::{Cluster, DataDisk, Node, objects};

use super::install;
use crate::e2e::parts::{full_node, node_without_storage};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const NAME: &str = "second-node";

pub(super) const INDEX: u8 = 1;

const MODE: VolumeMode = VolumeMode::Filesystem;

pub(in crate::e2e) async fn run(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    cluster: &Cluster,
    first: &Node,
) -> StepResult {
    let booted = cluster.boot_node(steps.session(), INDEX, DataDisk::Unmounted);
    let second = steps.step("boot a second node without a data file system", booted).await?;
    node_without_storage::run(steps, env, &second).await?;
    full_node::run(steps, env, first, &second).await?;
    let name = second.name().to_owned();
    steps.step("the second node leaves", leave(env, second)).await?;
    steps.step("a claim for which it was selected gets another node", reselected(env, &name)).await
}

async fn reselected(env: &TestEnv<'_>, deleted: &str) -> Result<()> {
    const CLAIM: &str = "on-a-deleted-node";
    let object = claim(CLAIM, &env.driver.class_name(), Size::mebibytes(1), MODE, "ReadWriteOnce")?;
    let object = claims::create(env, &claims::with_selected_node(object, deleted)).await?;
    start(env, CLAIM, CLAIM, MODE).await?;
    let names_node = |message: &str| message.contains(deleted);
    until_event(&env.client, &object, &["SelectedNodeRemoved"], env.timeouts.start, names_node).await?;
    end(env, CLAIM).await?;
    claims::delete_with_volume(env, CLAIM).await
}

/// Removes the node as an administrator does, with its pods' objects, because no kubelet reports their end.
pub(super) async fn leave(env: &TestEnv<'_>, node: Node) -> Result<()> {
    let name = node.name().to_owned();
    node.stop().await?;
    delete(env, &name).await?;
    install::serves(env, 1).await
}

/// Deletes the object of a stopped node, and those of its pods of the driver.
pub(in crate::e2e) async fn delete(env: &TestEnv<'_>, name: &str) -> Result<()> {
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
