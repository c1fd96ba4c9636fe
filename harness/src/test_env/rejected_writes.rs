//! An admission policy that rejects the provisioner's writes of PersistentVolumes. Its operations stay incomplete until the
//! policy is deleted.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use testvm_cluster::api_error::api_error;
use testvm_cluster::objects;
use tokio::time::{Instant, sleep};

use super::claims;
use super::environment::TestEnv;

const POLICY: &str = "loopfs-e2e-no-objects";
/// The message of the policy.
const REJECTION: &str = "held up by the end-to-end run";
/// The poll interval: no event announces that a policy is in force.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The rejected writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rejected {
    /// All creations of PersistentVolumes of the driver.
    Creations,
    /// The same, and all changes of them by the provisioner.
    CreationsAndUpdates,
}

/// Rejects the writes, and waits until the API server does so.
pub(crate) async fn reject(env: &TestEnv<'_>, rejected: Rejected) -> Result<()> {
    let (driver, namespace) = (&env.driver.name, env.driver.namespace());
    let operations: &[&str] = match rejected {
        Rejected::Creations => &["CREATE"],
        Rejected::CreationsAndUpdates => &["CREATE", "UPDATE"],
    };
    let others = format!(
        "request.operation == 'UPDATE' && !request.userInfo.username.startsWith('system:serviceaccount:{namespace}:')"
    );
    let policy: ValidatingAdmissionPolicy = serde_json::from_value(json!({
        "metadata": {"name": POLICY},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [""], "apiVersions": ["v1"], "operations": operations, "resources": ["persistentvolumes"],
            }]},
            "validations": [{
                "expression": format!("!has(object.spec.csi) || object.spec.csi.driver != '{driver}' || ({others})"),
                "message": REJECTION,
            }],
        },
    }))?;
    let binding: ValidatingAdmissionPolicyBinding = serde_json::from_value(json!({
        "metadata": {"name": POLICY}, "spec": {"policyName": POLICY, "validationActions": ["Deny"]},
    }))?;
    let (policies, bindings) = policies(env);
    objects::create(&policies, &policy).await?;
    objects::create(&bindings, &binding).await?;
    in_force(env).await
}

async fn in_force(env: &TestEnv<'_>) -> Result<()> {
    let volume: PersistentVolume = serde_json::from_value(json!({
        "metadata": {"name": POLICY},
        "spec": {
            "capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteOnce"],
            "csi": {"driver": env.driver.name, "volumeHandle": POLICY},
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

/// Deletes the policy, if there is one.
pub(crate) async fn allow(env: &TestEnv<'_>) -> Result<()> {
    let (policies, bindings) = policies(env);
    objects::delete_if_exists(&bindings, POLICY).await?;
    objects::delete_if_exists(&policies, POLICY).await
}

fn policies(env: &TestEnv<'_>) -> (Api<ValidatingAdmissionPolicy>, Api<ValidatingAdmissionPolicyBinding>) {
    (Api::all(env.client.clone()), Api::all(env.client.clone()))
}
