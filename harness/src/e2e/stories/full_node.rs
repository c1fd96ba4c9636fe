//! A node is full: the scheduler puts the next pod on another, where its volume is made.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::runtime::watcher;
use kube::{Api, ResourceExt};

use crate::cluster::Node;
use crate::cluster::api_error::told;
use crate::cluster::waiting::{State, until, until_one};
use crate::e2e::story::{Story, Told};
use crate::test_env::claims;
use crate::test_env::env::World;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Use, claim};

const FILLER: &str = "all-of-it";
const MOVED: &str = "elsewhere";
const SIZE: Size = Size::mebibytes(32);

pub(super) async fn tell(story: &mut Story<'_>, world: &World<'_>, first: &Node, second: &Node) -> Told {
    story.step("a claim takes all that the first node can still hold", fill(world, first)).await?;
    story.step("a pod and its volume go to the second", goes_to(world, second)).await?;
    story.step("pod and claims go", clear(world)).await
}

/// What the node's provisioner says that the largest volume may have.
pub(super) fn largest<'a>(
    world: &World<'_>,
    node: &Node,
    mut capacities: impl Iterator<Item = &'a CSIStorageCapacity>,
) -> Option<&'a Quantity> {
    let of_node = |capacity: &&CSIStorageCapacity| {
        let topology = capacity.node_topology.as_ref().and_then(|topology| topology.match_labels.as_ref());
        capacity.storage_class_name == world.driver.class_name()
            && topology.is_some_and(|labels| labels.values().any(|value| value == node.name()))
    };
    capacities.find(of_node)?.maximum_volume_size.as_ref()
}

/// The scheduler must have heard of it, too.
async fn fill(world: &World<'_>, node: &Node) -> Result<()> {
    let published: Api<CSIStorageCapacity> = Api::all(world.client.clone());
    let all = || watcher::Config::default();
    let found = until(published.clone(), all(), world.patience.start, |capacities| {
        State::when(largest(world, node, capacities.values()).is_some(), "the node says nothing of its room")
    })
    .await?;
    let room = largest(world, node, found.values()).context("it was there just now")?.clone();
    let mut filler = claim(FILLER, &world.driver.class_name(), SIZE, "Block", "ReadWriteOnce")?;
    let resources = filler.spec.get_or_insert_default().resources.get_or_insert_default();
    resources.requests.get_or_insert_default().insert("storage".into(), room.clone());
    claims::create(world, &claims::on_node(filler, node.name())).await?;
    let bound = |claim: Option<&PersistentVolumeClaim>| {
        State::when(claim.is_some_and(claims::is_bound), format!("the claim of {} is not bound", room.0))
    };
    until_one(world.claims(), FILLER, world.patience.start, bound).await?;
    until(published, all(), world.patience.start, |capacities| {
        let now = largest(world, node, capacities.values());
        State::when(now.is_some_and(|now| *now != room), format!("the node still says {now:?}"))
    })
    .await
    .map(drop)
}

async fn goes_to(world: &World<'_>, node: &Node) -> Result<()> {
    let object = claim(MOVED, &world.driver.class_name(), SIZE, "Filesystem", "ReadWriteOnce")?;
    claims::create(world, &object).await?;
    start(world, MOVED, MOVED, Use::Mounted, false).await?;
    let pod = world.pods().get(MOVED).await.map_err(told).context("read the pod")?;
    let on = pod.spec.and_then(|spec| spec.node_name);
    anyhow::ensure!(on.as_deref() == Some(node.name()), "the pod runs on {on:?}");
    Ok(())
}

async fn clear(world: &World<'_>) -> Result<()> {
    let filled = claims::volume_of(world, FILLER).await?.name_any();
    let moved = claims::volume_of(world, MOVED).await?.name_any();
    end(world, MOVED).await?;
    for (claim, volume) in [(FILLER, &filled), (MOVED, &moved)] {
        claims::delete(world, claim).await?;
        claims::gone(world, volume).await?;
    }
    Ok(())
}
