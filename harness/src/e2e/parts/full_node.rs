//! A node is full: the scheduler assigns the next pod to another node, where its volume is created.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::runtime::watcher;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::waiting::{State, until, until_one};
use testvm_cluster::workload::node_of;
use testvm_cluster::{Node, objects};

use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

const FILLER: &str = "all-of-it";
const MOVED: &str = "elsewhere";
const SIZE: Size = Size::mebibytes(32);

pub(in crate::e2e) async fn run(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    first: &Node,
    second: &Node,
) -> StepResult {
    steps.step("a claim takes all that the first node can still hold", fill(env, first)).await?;
    steps.step("a pod and its volume go to the second", goes_to(env, second)).await?;
    steps.step("pod and claims go", clear(env)).await
}

/// Returns the maximum volume size that the node's provisioner publishes.
pub(super) fn largest<'a>(
    env: &TestEnv<'_>,
    node: &Node,
    mut capacities: impl Iterator<Item = &'a CSIStorageCapacity>,
) -> Option<&'a Quantity> {
    let of_node = |capacity: &&CSIStorageCapacity| {
        let topology = capacity.node_topology.as_ref().and_then(|topology| topology.match_labels.as_ref());
        capacity.storage_class_name == env.driver.class_name()
            && topology.is_some_and(|labels| labels.values().any(|value| value == node.name()))
    };
    capacities.find(of_node)?.maximum_volume_size.as_ref()
}

/// Fills the node, and waits until the published capacity shows it to the scheduler.
async fn fill(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let published: Api<CSIStorageCapacity> = Api::all(env.client.clone());
    let all = || watcher::Config::default();
    let found = until(published.clone(), all(), env.timeouts.start, |capacities| {
        State::ready_if(
            largest(env, node, capacities.values()).is_some(),
            "the node says nothing of its room",
        )
    })
    .await?;
    let room = largest(env, node, found.values()).context("it was there just now")?.clone();
    // A Block volume of that size would leave what a Filesystem volume reserves for its inodes.
    let mut filler = claim(FILLER, &env.driver.class_name(), SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
    let resources = filler.spec.get_or_insert_default().resources.get_or_insert_default();
    resources.requests.get_or_insert_default().insert("storage".into(), room.clone());
    claims::create(env, &claims::with_selected_node(filler, node.name())).await?;
    let bound = |claim: Option<&PersistentVolumeClaim>| {
        State::ready_if(claim.is_some_and(claims::is_bound), format!("the claim of {} is not bound", room.0))
    };
    until_one(env.claims(), FILLER, env.timeouts.start, bound).await?;
    until(published, all(), env.timeouts.start, |capacities| {
        let now = largest(env, node, capacities.values());
        State::ready_if(now.is_some_and(|now| *now != room), format!("the node still says {now:?}"))
    })
    .await
    .map(drop)
}

async fn goes_to(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let object = claim(MOVED, &env.driver.class_name(), SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
    claims::create(env, &object).await?;
    start(env, MOVED, MOVED, VolumeMode::Filesystem).await?;
    let pod = objects::read(&env.pods(), MOVED).await?;
    let on = node_of(&pod);
    anyhow::ensure!(on == Some(node.name()), "the pod runs on {on:?}");
    Ok(())
}

async fn clear(env: &TestEnv<'_>) -> Result<()> {
    end(env, MOVED).await?;
    claims::delete_with_volume(env, FILLER).await?;
    claims::delete_with_volume(env, MOVED).await
}
