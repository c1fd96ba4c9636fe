//! The provisioner is killed in the middle of its work, and then the API server: each claim has one volume after that.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::ListParams;
use kube::runtime::watcher;

use super::removal;
use crate::cluster::api_error::told;
use crate::cluster::waiting::{State, until};
use crate::cluster::{Cluster, Node};
use crate::e2e::story::{Story, Told};
use crate::test_env::claims;
use crate::test_env::containers::{Container, kill};
use crate::test_env::env::{FOREIGN_NODE, World};
use crate::test_env::inventory::Inventory;
use crate::test_env::sizes::Size;
use crate::test_env::workload::claim;

pub(in crate::e2e) const NAME: &str = "outages";

const SIZE: Size = Size::mebibytes(1);
/// Enough that some are in the making when the first is done.
const CLAIMS: usize = 20;
const PROVISIONER: &str = "provisioner";

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    let (Some(cluster), Some(node)) = (world.cluster, world.node) else {
        story.skip("kill the provisioner and the API server while they work", FOREIGN_NODE);
        return Ok(());
    };
    let before = story.step("look at the node", Inventory::take(node)).await?;
    story.step("the provisioner is killed with volumes in the making", kill_at_work(world, node)).await?;
    story.step("each claim has one volume, and no volume is without", one_each(world, node, &before)).await?;
    story
        .step("the API server is killed with volumes in the making", kill_api_server(world, cluster))
        .await?;
    story.step("each claim has one volume all the same", one_each(world, node, &before)).await?;
    story.step("deleted with their claims, they leave nothing", remove(world, node, &before)).await
}

/// Answers the claims' names.
async fn create(world: &World<'_>, prefix: &str) -> Result<BTreeSet<String>> {
    let class = world.driver.class_name();
    let node = world.node.context(FOREIGN_NODE)?.name();
    let made = (0..CLAIMS).map(async |index| {
        let name = format!("{prefix}-{index}");
        let mode = if index % 2 == 0 { "Filesystem" } else { "Block" };
        let object = claim(&name, &class, SIZE, mode, "ReadWriteOnce")?;
        claims::create(world, &claims::on_node(object, node)).await?;
        Ok::<String, anyhow::Error>(name)
    });
    Ok(try_join_all(made).await?.into_iter().collect())
}

async fn kill_at_work(world: &World<'_>, node: &Node) -> Result<()> {
    let names = create(world, "killed").await?;
    until_bound(world, &names, 1).await?;
    kill_provisioner(world, node).await
}

pub(super) async fn kill_provisioner(world: &World<'_>, node: &Node) -> Result<()> {
    for pod in world.live_driver_pods().await? {
        kill(node, &Container::of(&pod, PROVISIONER)?).await?;
    }
    Ok(())
}

async fn kill_api_server(world: &World<'_>, cluster: &Cluster) -> Result<()> {
    let names = create(world, "unanswered").await?;
    until_bound(world, &names, 1).await?;
    cluster.restart_api_server().await
}

/// Waits until at least so many of the claims are bound.
pub(super) async fn until_bound(world: &World<'_>, names: &BTreeSet<String>, least: usize) -> Result<()> {
    let bound = |claims: &BTreeMap<String, PersistentVolumeClaim>| {
        let ours = claims.values().filter(|claim| names.contains(&claim.name_any()));
        ours.filter(|claim| claims::is_bound(claim)).count()
    };
    until(world.claims(), watcher::Config::default(), world.patience.start, |claims| {
        let bound = bound(claims);
        State::when(bound >= least, format!("{bound} of {least} claims are bound"))
    })
    .await
    .map(drop)
}

/// All claims of this story are bound, and there are as many objects and as many volumes on the node, no more.
async fn one_each(world: &World<'_>, node: &Node, before: &Inventory) -> Result<()> {
    let claims =
        world.claims().list(&ListParams::default()).await.map_err(told).context("list the claims")?;
    let names =
        claims.iter().map(ResourceExt::name_any).filter(|name| is_ours(name)).collect::<BTreeSet<_>>();
    until_bound(world, &names, names.len()).await?;
    let of_ours = claims::with_objects(world, is_ours).await?;
    anyhow::ensure!(
        of_ours.iter().eq(&names),
        "{} claims, and PersistentVolumes of {}",
        names.len(),
        of_ours.join(", ")
    );
    let made = Inventory::take(node).await?.volumes_beyond(before);
    anyhow::ensure!(
        made.len() == names.len(),
        "{} claims, and on the node the volumes {}",
        names.len(),
        made.join(", ")
    );
    Ok(())
}

fn is_ours(claim: &str) -> bool {
    claim.starts_with("killed-") || claim.starts_with("unanswered-")
}

async fn remove(world: &World<'_>, node: &Node, before: &Inventory) -> Result<()> {
    let claims =
        world.claims().list(&ListParams::default()).await.map_err(told).context("list the claims")?;
    for name in claims.iter().map(ResourceExt::name_any).filter(|name| is_ours(name)) {
        claims::delete(world, &name).await?;
    }
    removal::nothing_left(world, node, before).await
}
