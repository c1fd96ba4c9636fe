//! A node is full: the scheduler puts the next pod on another, where its volume is made.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node as NodeObject, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::DeleteParams;
use kube::runtime::watcher;
use kube::{Api, ResourceExt};

use super::install;
use crate::cluster::Node;
use crate::cluster::api_error::told;
use crate::cluster::waiting::{State, until, until_one};
use crate::e2e::claims;
use crate::e2e::pods::{end, start};
use crate::e2e::sizes::Size;
use crate::e2e::story::{Story, Told};
use crate::e2e::workload::{Use, claim};
use crate::e2e::world::{FOREIGN_NODE, World};

pub(in crate::e2e) const NAME: &str = "full node";

const SECOND: u8 = 1;
const FILLER: &str = "all-of-it";
const MOVED: &str = "elsewhere";
const SIZE: Size = Size::mebibytes(32);

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    let (Some(cluster), Some(first)) = (world.cluster, world.node) else {
        story.skip("fill a node, with another beside it", FOREIGN_NODE);
        return Ok(());
    };
    let session = story.session();
    let second = story.step("boot a second node", cluster.boot_node(session, SECOND)).await?;
    story.step("the driver serves on both", serves(world, 2)).await?;
    story.step("a claim takes all that the first node can still hold", fill(world, first)).await?;
    story.step("a pod and its volume go to the second", goes_to(world, &second)).await?;
    story.step("pod and claims go", clear(world)).await?;
    story.step("the second node leaves", leave(world, second)).await
}

async fn serves(world: &World<'_>, nodes: i32) -> Result<()> {
    let name = world.driver.daemon_set();
    until_one(world.daemon_sets(), name, world.patience.start, |daemon_set| {
        let status = daemon_set.and_then(|daemon_set| daemon_set.status.as_ref());
        let (wanted, ready) =
            status.map_or((0, 0), |status| (status.desired_number_scheduled, status.number_ready));
        State::when(wanted == nodes && ready == nodes, format!("{ready} of {wanted} pods are ready"))
    })
    .await?;
    install::served(world).await
}

/// What the node's provisioner says that the largest volume may have.
fn largest<'a>(
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

/// As an administrator takes a node out: what ran there is told to be gone, for no kubelet will.
async fn leave(world: &World<'_>, node: Node) -> Result<()> {
    let name = node.name().to_owned();
    node.stop().await?;
    let nodes: Api<NodeObject> = Api::all(world.client.clone());
    nodes.delete(&name, &DeleteParams::default()).await.map_err(told).context("delete the Node")?;
    for pod in world.live_driver_pods().await? {
        if pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&name) {
            let forced = DeleteParams::default().grace_period(0);
            let deleted = world.driver_pods().delete(&pod.name_any(), &forced).await;
            deleted.map_err(told).context("delete the driver's pod")?;
        }
    }
    serves(world, 1).await
}
