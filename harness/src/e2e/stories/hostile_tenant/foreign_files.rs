//! Files with the project id of the other tenant's volume, which uses up the limit of that volume. The search of csi finds and repairs
//! them, and the provisioner reports them.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Container;
use kube::ResourceExt;
use serde::Deserialize;
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::exec_ok;
use testvm_cluster::waiting::until_event;
use testvm_cluster::{Node, objects};

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

/// The arguments of csi, as the manifests have them.
pub(super) struct Settings {
    args: Vec<String>,
}

impl Settings {
    pub(super) async fn read(env: &TestEnv<'_>) -> Result<Settings> {
        let daemon_set = objects::read(&env.daemon_sets(), env.driver.daemon_set()).await?;
        let pod = daemon_set.spec.and_then(|spec| spec.template.spec).context("the DaemonSet has no pods")?;
        let is_csi = |container: &Container| container.name == CSI;
        let args = pod.containers.into_iter().find(is_csi).and_then(|container| container.args);
        let args = args.with_context(|| format!("the DaemonSet has no arguments of {CSI}"))?;
        Ok(Settings { args })
    }

    /// Adds options to csi, as an administrator does who looks for such files.
    pub(super) async fn search_often(&self, env: &TestEnv<'_>) -> Result<()> {
        let args: Vec<String> = self.args.iter().cloned().chain(SEARCH.map(str::to_owned)).collect();
        change_container(env, &json!({"name": CSI, "args": args})).await
    }

    pub(super) async fn restore(&self, env: &TestEnv<'_>) -> Result<()> {
        change_container(env, &json!({"name": CSI, "args": self.args})).await
    }
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
