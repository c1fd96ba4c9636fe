//! Files with the project id of the other tenant's volume, which uses up the limit of that volume. The search of csi finds and repairs
//! them, and the provisioner reports them.

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::DaemonSet;
use kube::ResourceExt;
use serde::Deserialize;
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::Node;
use testvm_cluster::exec::exec_ok;
use testvm_cluster::waiting::until_event;

use super::tenants::{HOSTILE, OTHER, Tenants, directory_of, quota};
use crate::e2e::parts::serving::change_container;
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;

const CSI: &str = "csi";
/// The options of an administrator who looks for such files. The interval is short for the test.
const SEARCH: [&str; 3] = ["--search-projects", "--repair-projects", "--check-interval=5"];
/// The size of the files in the directory that the tenant charges to the other volume.
const CHARGED_BYTES: u64 = 1 << 20;

/// The usage of a project, as the tool of loopfs prints it.
#[derive(Debug, Deserialize)]
struct Usage {
    id: u32,
    bytes: Bytes,
}

#[derive(Debug, Deserialize)]
struct Bytes {
    used: u64,
}

/// Adds options to csi, as an administrator does who looks for such files.
pub(super) async fn search_often(env: &TestEnv<'_>) -> Result<()> {
    let args = args(env)?.into_iter().chain(SEARCH.map(str::to_owned)).collect();
    change_args(env, args).await
}

/// Gives csi the arguments of the manifests.
pub(super) async fn restore(env: &TestEnv<'_>) -> Result<()> {
    change_args(env, args(env)?).await
}

async fn change_args(env: &TestEnv<'_>, args: Vec<String>) -> Result<()> {
    change_container(env, &json!({"name": CSI, "args": args})).await
}

/// Returns the arguments of csi in the manifests.
fn args(env: &TestEnv<'_>) -> Result<Vec<String>> {
    let daemon_set: DaemonSet = env.manifests.only("DaemonSet")?;
    let pod = daemon_set.spec.and_then(|spec| spec.template.spec).context("the DaemonSet has no pods")?;
    let csi = pod.containers.into_iter().find(|container| container.name == CSI);
    csi.and_then(|csi| csi.args).with_context(|| format!("the DaemonSet has no arguments of {CSI}"))
}

pub(super) async fn run(steps: &mut Steps<'_>, tenants: &Tenants<'_>) -> StepResult {
    steps.step("the tenant charges files to the other tenant's volume", charge(tenants)).await?;
    let title = "csi puts the files back, and the provisioner reports both volumes";
    steps.step(title, reported(tenants)).await
}

/// Changes the project id of a directory, which its owner may do in the user namespace of the host.
async fn charge(tenants: &Tenants<'_>) -> Result<()> {
    let id = usage(tenants.node, &tenants.other_volume).await?.id.to_string();
    let pods = tenants.env.pods();
    exec_ok(&pods, HOSTILE, &["/loopfs", "quota", "tag", "--id", &id, "/vol/charged"]).await.map(drop)
}

async fn usage(node: &Node, directory: &str) -> Result<Usage> {
    let quota = quota(node, directory).await?;
    serde_json::from_str(&quota).with_context(|| format!("parse {quota:?}"))
}

async fn reported(tenants: &Tenants<'_>) -> Result<()> {
    let (client, within) = (&tenants.env.client, tenants.env.timeouts.start);
    let hostile = claims::volume_of(tenants.env, HOSTILE).await?;
    let other = claims::volume_of(tenants.other, OTHER).await?;
    let name = other.name_any();
    let names = |message: &str| message.contains(&name);
    until_event(client, &hostile, &["FilesInForeignProject"], within, names).await?;
    until_event(client, &other, &["ChargedForForeignFiles"], within, names).await?;
    let repaired = |message: &str| message.contains("--repair-projects");
    until_event(client, &hostile, &["ProjectRepaired"], within, repaired).await?;
    tenants.check_other_state().await?;
    let used = usage(tenants.node, &directory_of(tenants.env, HOSTILE).await?).await?.bytes.used;
    anyhow::ensure!(used >= CHARGED_BYTES, "the tenant's own volume has only {used} bytes again");
    Ok(())
}
