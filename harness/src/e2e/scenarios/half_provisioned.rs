//! The provisioner is killed after it created volumes and before it created their PersistentVolumes. Each
//! claim must get the volume that was created for it before. The volume of a claim that was deleted in the
//! meantime must be deleted.
//!
//! To hold that state, an admission policy rejects the provisioner's PersistentVolumes until the provisioner
//! is dead.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use testvm_cluster::Node;
use testvm_cluster::api_error::api_error;
use testvm_cluster::waiting::until_event;
use tokio::time::{Instant, sleep};

use super::{outages, removal};
use crate::e2e::scenario::{Scenario, StepResult};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const NAME: &str = "half provisioned";

const SIZE: Size = Size::mebibytes(1);
const KEPT: [(&str, VolumeMode); 2] =
    [("half-mounted", VolumeMode::Filesystem), ("half-device", VolumeMode::Block)];
const DELETED: (&str, VolumeMode) = ("half-deleted", VolumeMode::Filesystem);

const POLICY: &str = "loopfs-e2e-no-objects";
/// The message of the policy that rejects the provisioner's PersistentVolumes.
const REJECTION: &str = "held up by the end-to-end run";
/// The poll interval: no event announces that a policy is in force, or that an unneeded volume is deleted.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

pub(in crate::e2e) async fn run(scenario: &mut Scenario<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    let before = scenario.step("list what is on the node", Inventory::take(node)).await?;
    scenario.step("the API server takes no objects of volumes", refuse(env)).await?;
    let made =
        scenario.step("claims have volumes and no objects", create_volumes_only(env, node, &before)).await?;
    scenario.step("the provisioner is killed, and one claim deleted", kill(env, node)).await?;
    scenario.step("the API server takes objects again", allow(env)).await?;
    let title = "the claims have the volumes that were made, and the deleted one has none";
    scenario.step(title, settled(env, node, &before, &made)).await?;
    scenario.step("deleted with their claims, they leave nothing", remove(env, node, &before)).await
}

async fn refuse(env: &TestEnv<'_>) -> Result<()> {
    let driver = &env.driver.name;
    let policy: ValidatingAdmissionPolicy = serde_json::from_value(json!({
        "metadata": {"name": POLICY},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["persistentvolumes"],
            }]},
            "validations": [{
                "expression": format!("!has(object.spec.csi) || object.spec.csi.driver != '{driver}'"), "message": REJECTION,
            }],
        },
    }))?;
    let binding: ValidatingAdmissionPolicyBinding = serde_json::from_value(json!({
        "metadata": {"name": POLICY}, "spec": {"policyName": POLICY, "validationActions": ["Deny"]},
    }))?;
    let (policies, bindings) = policies(env);
    policies.create(&PostParams::default(), &policy).await.map_err(api_error).context("create the policy")?;
    bindings.create(&PostParams::default(), &binding).await.map_err(api_error).context("bind the policy")?;

    let volume: PersistentVolume = serde_json::from_value(json!({
        "metadata": {"name": POLICY},
        "spec": {
            "capacity": {"storage": SIZE.quantity()}, "accessModes": ["ReadWriteOnce"],
            "csi": {"driver": driver, "volumeHandle": POLICY},
        },
    }))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let deadline = Instant::now() + env.timeouts.start;
    loop {
        match claims::volumes(env).create(&dry_run, &volume).await {
            Err(error) if error.to_string().contains(REJECTION) => return Ok(()),
            Ok(_) if Instant::now() < deadline => sleep(POLL_INTERVAL).await,
            Ok(_) => anyhow::bail!("the policy is not in force"),
            Err(error) => return Err(api_error(error)).context("try to create a PersistentVolume"),
        }
    }
}

async fn allow(env: &TestEnv<'_>) -> Result<()> {
    let (policies, bindings) = policies(env);
    let parameters = DeleteParams::default();
    bindings.delete(POLICY, &parameters).await.map_err(api_error).context("unbind the policy")?;
    policies.delete(POLICY, &parameters).await.map_err(api_error).context("delete the policy").map(drop)
}

fn policies(env: &TestEnv<'_>) -> (Api<ValidatingAdmissionPolicy>, Api<ValidatingAdmissionPolicyBinding>) {
    (Api::all(env.client.clone()), Api::all(env.client.clone()))
}

/// Waits until the provisioner has created a volume for each claim but no PersistentVolume, and returns the
/// volumes.
async fn create_volumes_only(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<BTreeSet<String>> {
    let all = || KEPT.iter().chain([&DELETED]);
    try_join_all(all().map(async |(name, mode)| {
        let object = claim(name, &env.driver.class_name(), SIZE, *mode, "ReadWriteOnce")?;
        let claim = claims::create(env, &claims::with_selected_node(object, node.name())).await?;
        // The provisioner has created the volume before this event.
        refused(env, &claim).await
    }))
    .await?;
    let volumes: BTreeSet<String> =
        Inventory::take(node).await?.volumes_added_since(before).into_iter().collect();
    anyhow::ensure!(volumes.len() == all().count(), "on the node are the volumes {volumes:?}");
    let objects = claims::with_objects(env, is_ours).await?;
    anyhow::ensure!(objects.is_empty(), "there are PersistentVolumes of {objects:?}");
    Ok(volumes)
}

async fn refused(env: &TestEnv<'_>, claim: &PersistentVolumeClaim) -> Result<()> {
    let refused = |message: &str| message.contains(REJECTION);
    until_event(&env.client, claim, &["ProvisioningFailed"], env.timeouts.start, refused).await.map(drop)
}

async fn kill(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    outages::kill_provisioner(env, node).await?;
    claims::delete(env, DELETED.0).await
}

async fn settled(env: &TestEnv<'_>, node: &Node, before: &Inventory, made: &BTreeSet<String>) -> Result<()> {
    let kept: BTreeSet<String> = KEPT.iter().map(|(name, _)| (*name).to_owned()).collect();
    outages::until_bound(env, &kept, kept.len()).await?;
    let deadline = Instant::now() + env.timeouts.end;
    loop {
        let volumes = Inventory::take(node).await?.volumes_added_since(before);
        anyhow::ensure!(
            volumes.iter().all(|volume| made.contains(volume)),
            "{volumes:?}, and those that were made first are {made:?}"
        );
        if volumes.len() == kept.len() {
            break;
        }
        anyhow::ensure!(Instant::now() < deadline, "{} claims, and the volumes {volumes:?}", kept.len());
        sleep(POLL_INTERVAL).await;
    }
    let objects = claims::with_objects(env, is_ours).await?;
    anyhow::ensure!(objects.iter().eq(&kept), "there are PersistentVolumes of {objects:?}");
    Ok(())
}

fn is_ours(claim: &str) -> bool {
    KEPT.iter().chain([&DELETED]).any(|(ours, _)| *ours == claim)
}

async fn remove(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<()> {
    for (name, _) in KEPT {
        claims::delete(env, name).await?;
    }
    removal::nothing_left(env, node, before).await
}
