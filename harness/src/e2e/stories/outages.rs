//! The provisioner is killed while it provisions, and then the API server. After that each claim has exactly
//! one volume.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use futures::future::{try_join, try_join_all};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::runtime::watcher;
use testvm::excerpt::list;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::waiting::{State, until};
use testvm_cluster::{Cluster, Node, objects};

use crate::e2e::sabotages::{add_volume, remove_volume};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::disturbances::{kill_processes, processes};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::Inventory;
use crate::test_env::sizes::Size;
use crate::test_env::workload::VolumeMode;

pub(in crate::e2e) const STORY: Story = Story {
    name: "outages",
    about: "the provisioner and the API server are killed while they work",
    when: When::All,
    run: Run::OwnNode(|steps, state, cluster, node| Box::pin(run(steps, state.env, cluster, node))),
    sabotages: &[Sabotage {
        name: "too-many-volumes",
        about: "A volume more is on the node than there are claims",
        before: "each claim has one volume, and no volume is without",
        change: |env| Box::pin(add_volume(env)),
        repair: Some(|env| Box::pin(remove_volume(env))),
        expected: &["100 claims, and on the node the volumes"],
    }],
};

const SIZE: Size = Size::mebibytes(1);
/// The number of claims of a batch: enough that some are unbound when a process is killed after the first is bound. On an emulated node,
/// 27 claims are bound per second (`cargo harness bench provision`), and a shell of the node sends the signal.
const CLAIMS: usize = 100;
const PROVISIONER: &str = "provisioner";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, cluster: &Cluster, node: &Node) -> StepResult {
    steps.step("the provisioner is killed with volumes in the making", kill_at_work(env, node)).await?;
    let title = "each claim has one volume, and no volume is without";
    steps.step(title, check_one_volume_each(env, node, CLAIMS)).await?;
    steps.step("the API server is killed with volumes in the making", kill_api_server(env, cluster)).await?;
    steps.step("each claim has one volume all the same", check_one_volume_each(env, node, 2 * CLAIMS)).await
}

/// Returns the names of a batch of claims.
fn names(prefix: &str) -> BTreeSet<String> {
    (0..CLAIMS).map(|index| format!("{prefix}-{index}")).collect()
}

async fn create(env: &TestEnv<'_>, names: &BTreeSet<String>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?.name();
    let create_one = async |(index, name): (usize, &String)| {
        let mode = if index % 2 == 0 { VolumeMode::Filesystem } else { VolumeMode::Block };
        claims::request_on(env, node, name, SIZE, mode).await.map(drop)
    };
    try_join_all(names.iter().enumerate().map(create_one)).await.map(drop)
}

async fn kill_at_work(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let names = names("killed");
    // containerd's tool needs half of the time in which the claims are bound.
    let found = processes(env, node, PROVISIONER).await?;
    let kill = async {
        until_bound(env, &names, 1).await?;
        kill_processes(env, node, &found, PROVISIONER).await
    };
    // The process must die before the last claim is bound.
    try_join(create(env, &names), kill).await?;
    // A claim that is unbound now was unbound when the provisioner was killed.
    require_unbound(&claims_of(env, &names).await?)
}

async fn kill_api_server(env: &TestEnv<'_>, cluster: &Cluster) -> Result<()> {
    let names = names("unanswered");
    create(env, &names).await?;
    until_bound(env, &names, 1).await?;
    // The claims cannot be read while the API server is down, and the provisioner continues as soon as it is up.
    require_unbound(&claims_of(env, &names).await?)?;
    cluster.restart_api_server().await
}

async fn claims_of(env: &TestEnv<'_>, names: &BTreeSet<String>) -> Result<Vec<PersistentVolumeClaim>> {
    let claims = objects::list(&env.claims(), "").await?;
    Ok(claims.into_iter().filter(|claim| names.contains(&claim.name_any())).collect())
}

/// Checks that a claim is unbound, so that a process that is killed leaves work behind.
fn require_unbound(claims: &[PersistentVolumeClaim]) -> Result<()> {
    let count = claims.len();
    anyhow::ensure!(
        !claims.iter().all(claims::is_bound),
        "all {count} claims are bound already: create more"
    );
    Ok(())
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

/// Checks that this story has this number of claims, that all are bound, and that there are exactly as many PersistentVolumes
/// and volumes on the node.
async fn check_one_volume_each(env: &TestEnv<'_>, node: &Node, claims: usize) -> Result<()> {
    let names: BTreeSet<_> =
        objects::list(&env.claims(), "").await?.iter().map(ResourceExt::name_any).collect();
    anyhow::ensure!(names.len() == claims, "there are {} claims instead of {claims}", names.len());
    until_bound(env, &names, names.len()).await?;
    let of_ours = claims::with_objects(env).await?;
    anyhow::ensure!(
        of_ours.iter().eq(&names),
        "{} claims, and PersistentVolumes of {}",
        names.len(),
        list(&of_ours)
    );
    let made = Inventory::take(node).await?.volumes_added_since(&Inventory::default());
    anyhow::ensure!(
        made.len() == names.len(),
        "{} claims, and on the node the volumes {}",
        names.len(),
        list(&made)
    );
    Ok(())
}
