//! The provisioner is killed while it provisions, and then the API server. After that each claim has exactly
//! one volume.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::ListParams;
use kube::runtime::watcher;
use testvm_cluster::api_error::api_error;
use testvm_cluster::waiting::{State, until};
use testvm_cluster::{Cluster, Node};

use super::removal;
use crate::e2e::scenario::{Scenario, StepResult};
use crate::test_env::claims;
use crate::test_env::disturbances::kill;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::Inventory;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const NAME: &str = "outages";

const SIZE: Size = Size::mebibytes(1);
/// The number of claims: enough that some are being provisioned when the first is bound.
const CLAIMS: usize = 20;
const PROVISIONER: &str = "provisioner";

pub(in crate::e2e) async fn run(
    scenario: &mut Scenario<'_>,
    env: &TestEnv<'_>,
    cluster: &Cluster,
    node: &Node,
) -> StepResult {
    let before = scenario.step("list what is on the node", Inventory::take(node)).await?;
    scenario.step("the provisioner is killed with volumes in the making", kill_at_work(env, node)).await?;
    scenario
        .step(
            "each claim has one volume, and no volume is without",
            check_one_volume_each(env, node, &before),
        )
        .await?;
    scenario
        .step("the API server is killed with volumes in the making", kill_api_server(env, cluster))
        .await?;
    scenario
        .step("each claim has one volume all the same", check_one_volume_each(env, node, &before))
        .await?;
    scenario.step("deleted with their claims, they leave nothing", remove(env, node, &before)).await
}

/// Creates the claims, and returns their names.
async fn create(env: &TestEnv<'_>, prefix: &str) -> Result<BTreeSet<String>> {
    let class = env.driver.class_name();
    let node = env.node.context(FOREIGN_NODE)?.name();
    let made = (0..CLAIMS).map(async |index| {
        let name = format!("{prefix}-{index}");
        let mode = if index % 2 == 0 { VolumeMode::Filesystem } else { VolumeMode::Block };
        let object = claim(&name, &class, SIZE, mode, "ReadWriteOnce")?;
        claims::create(env, &claims::with_selected_node(object, node)).await?;
        Ok::<String, anyhow::Error>(name)
    });
    Ok(try_join_all(made).await?.into_iter().collect())
}

async fn kill_at_work(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let names = create(env, "killed").await?;
    until_bound(env, &names, 1).await?;
    kill_provisioner(env, node).await
}

pub(super) async fn kill_provisioner(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    for pod in env.live_driver_pods().await? {
        kill(env, node, &pod, PROVISIONER).await?;
    }
    Ok(())
}

async fn kill_api_server(env: &TestEnv<'_>, cluster: &Cluster) -> Result<()> {
    let names = create(env, "unanswered").await?;
    until_bound(env, &names, 1).await?;
    cluster.restart_api_server().await
}

/// Waits until at least `least` of the claims are bound.
pub(super) async fn until_bound(env: &TestEnv<'_>, names: &BTreeSet<String>, least: usize) -> Result<()> {
    let bound = |claims: &BTreeMap<String, PersistentVolumeClaim>| {
        let ours = claims.values().filter(|claim| names.contains(&claim.name_any()));
        ours.filter(|claim| claims::is_bound(claim)).count()
    };
    until(env.claims(), watcher::Config::default(), env.timeouts.start, |claims| {
        let bound = bound(claims);
        State::ready_if(bound >= least, format!("{bound} of {least} claims are bound"))
    })
    .await
    .map(drop)
}

/// Checks that all claims of this scenario are bound, and that there are exactly as many PersistentVolumes
/// and volumes on the node.
async fn check_one_volume_each(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<()> {
    let claims =
        env.claims().list(&ListParams::default()).await.map_err(api_error).context("list the claims")?;
    let names =
        claims.iter().map(ResourceExt::name_any).filter(|name| is_ours(name)).collect::<BTreeSet<_>>();
    until_bound(env, &names, names.len()).await?;
    let of_ours = claims::with_objects(env, is_ours).await?;
    anyhow::ensure!(
        of_ours.iter().eq(&names),
        "{} claims, and PersistentVolumes of {}",
        names.len(),
        of_ours.join(", ")
    );
    let made = Inventory::take(node).await?.volumes_added_since(before);
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

async fn remove(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<()> {
    let claims =
        env.claims().list(&ListParams::default()).await.map_err(api_error).context("list the claims")?;
    for name in claims.iter().map(ResourceExt::name_any).filter(|name| is_ours(name)) {
        claims::delete(env, &name).await?;
    }
    removal::nothing_left(env, node, before).await
}
