//! A node is full: the scheduler assigns the next pod to another node, where its volume is created.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::runtime::watcher;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::waiting::{State, until, until_event, until_one};
use testvm_cluster::workload::node_of;
use testvm_cluster::{Node, objects};

use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::start;
use crate::test_env::sizes::Size;
use crate::test_env::workload::VolumeMode;

const FILLER: &str = "all-of-it";
const MOVED: &str = "elsewhere";
const RESELECTED: &str = "on-a-deleted-node";
const DELETED_NODE: &str = "node-that-was-deleted";
const MODE: VolumeMode = VolumeMode::Filesystem;
const SIZE: Size = Size::mebibytes(32);

pub(in crate::e2e) async fn run(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    first: &Node,
    second: &Node,
) -> StepResult {
    steps.step("a claim takes all that the first node can still hold", fill(env, first)).await?;
    let title =
        "pods go to the second with their volumes, also one whose claim names a node that was deleted";
    steps.step(title, go_to(env, second)).await
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
    let mut filler = claims::claim_of_driver(env, FILLER, SIZE, MODE)?;
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

/// Starts pods, which the scheduler assigns to the node. It selects a node for the second claim again after the controller has removed
/// the annotation with the deleted one.
async fn go_to(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    claims::request(env, MOVED, SIZE, MODE).await?;
    let reselected = claims::request_on(env, DELETED_NODE, RESELECTED, SIZE, MODE).await?;
    tokio::try_join!(start(env, MOVED, MOVED, MODE), start(env, RESELECTED, RESELECTED, MODE))?;
    let names_node = |message: &str| message.contains(DELETED_NODE);
    until_event(&env.client, &reselected, &["SelectedNodeRemoved"], env.timeouts.start, names_node).await?;
    for name in [MOVED, RESELECTED] {
        let pod = objects::read(&env.pods(), name).await?;
        let on = node_of(&pod);
        anyhow::ensure!(on == Some(node.name()), "the pod {name} runs on {on:?}");
    }
    Ok(())
}
