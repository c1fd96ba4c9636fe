//! Claims, written as the user, the scheduler and kube-controller-manager write them, and the component claim-labels.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicyBinding;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::api_error::api_error;
use testvm_cluster::objects;

use super::super::cluster::{CLASS, NAMESPACE};
use super::process::DRIVER;
use crate::fake_nodes::SYSTEM;
use crate::test_env::claim_labels::{BINDING_UID, LABEL, NAME};
use crate::test_env::claims::SELECTED_NODE;
use crate::test_env::sizes::Size;
use crate::test_env::{manifests, workload};

const CLAIM_SIZE: Size = Size::mebibytes(1);
/// The timeout until the API server applies a policy that it has stored.
const POLICY_TIMEOUT: Duration = Duration::from_secs(120);
const POLICY_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The names by which the API server records who has written which field of a claim.
const USER: &str = "kubectl";
const SCHEDULER: &str = "kube-scheduler";
const CONTROLLER_MANAGER: &str = "kube-controller-manager";

/// The annotations with the name of the driver. kube-controller-manager writes both.
const PROVISIONER: [&str; 2] =
    ["volume.beta.kubernetes.io/storage-provisioner", "volume.kubernetes.io/storage-provisioner"];
/// The annotations of a claim that kube-controller-manager has bound.
const BOUND: [&str; 2] = ["pv.kubernetes.io/bind-completed", "pv.kubernetes.io/bound-by-controller"];

/// The number of objects that are created concurrently.
pub(super) const CREATE_CONCURRENCY: usize = 32;

/// Installs the component claim-labels: its objects, and the record with which nodes watch only their own claims. The controller
/// writes the record when all claims are labelled, and there are none yet.
pub(super) async fn install_labels(session: &Session, client: &Client) -> Result<()> {
    manifests::of_claim_labels(session)?.apply(client).await?;
    let bindings: Api<MutatingAdmissionPolicyBinding> = Api::all(client.clone());
    let uid =
        objects::read(&bindings, NAME).await?.metadata.uid.context("the binding of the policy has no UID")?;
    let records: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM);
    let record = json!({"data": {BINDING_UID: uid}});
    objects::patch(&records, NAME, &record).await.map(drop)
}

/// Calls `create` with each number, concurrently. `kind` is the plural in the progress.
pub(super) async fn create_numbered<F: Future<Output = Result<()>>>(
    numbers: Range<u64>,
    kind: &str,
    step: &Step,
    create: impl Fn(u64) -> F,
) -> Result<()> {
    let Range { start, end } = numbers;
    let mut creating = futures::stream::iter(numbers).map(create).buffer_unordered(CREATE_CONCURRENCY);
    let mut existing = start;
    while creating.try_next().await?.is_some() {
        existing += 1;
        step.note(format!("{existing} of {end} {kind}"));
    }
    Ok(())
}

/// The claims of one node.
pub(super) struct Claims {
    api: Api<PersistentVolumeClaim>,
    node: &'static str,
    /// The number of claims that exist.
    existing: u64,
    /// The number of claims that [`Claims::live`] has created and deleted.
    deleted: u64,
}

impl Claims {
    pub(super) fn new(client: &Client, node: &'static str) -> Claims {
        Claims { api: Api::namespaced(client.clone(), NAMESPACE), node, existing: 0, deleted: 0 }
    }

    /// Waits until the API server labels new claims.
    pub(super) async fn until_labelled(&self) -> Result<()> {
        let started = Instant::now();
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        loop {
            let probe = self.bound_claim("probe", "probe")?;
            let created = self.api.create(&dry_run, &probe).await;
            let created = created.map_err(api_error).context("dry run of the creation of a claim")?;
            if created.labels().get(LABEL).map(String::as_str) == Some(self.node) {
                return Ok(());
            }
            anyhow::ensure!(
                started.elapsed() < POLICY_TIMEOUT,
                "the API server does not label claims {POLICY_TIMEOUT:?} after the policy was created"
            );
            tokio::time::sleep(POLICY_POLL_INTERVAL).await;
        }
    }

    /// Creates bound claims until there are `count`.
    pub(super) async fn create_up_to(&mut self, count: u64, step: &Step) -> Result<()> {
        create_numbered(self.existing..count, "claims", step, |number| self.create_bound(number)).await?;
        self.existing = count;
        Ok(())
    }

    /// Creates a claim with all that its binding has added, so that each claim takes two writes.
    async fn create_bound(&self, number: u64) -> Result<()> {
        let name = format!("standing-{number}");
        let claim = self.bound_claim(&name, &volume_name(number))?;
        let created = create(&self.api, &claim).await?;
        let label = created.labels().get(LABEL).map(String::as_str);
        anyhow::ensure!(label == Some(self.node), "claim {name} has the label {label:?}");
        self.patch_status(&name).await
    }

    /// Creates a claim, selects its node, binds and deletes it, in as many writes as on a cluster with its node.
    pub(super) async fn live(&mut self) -> Result<()> {
        let number = self.deleted;
        self.deleted += 1;
        let name = format!("short-lived-{number}");
        create_for_node(&self.api, &name, self.node).await?;
        annotate_with_driver(&self.api, &name).await?;
        let mut bound = annotated(BOUND.map(|key| (key, "yes")));
        bound["spec"] = json!({"volumeName": volume_name(number)});
        patch(&self.api, &name, CONTROLLER_MANAGER, &bound).await?;
        self.patch_status(&name).await?;
        delete(&self.api, &name).await
    }

    /// Returns a claim as it is when it is bound, without its status.
    fn bound_claim(&self, name: &str, volume: &str) -> Result<PersistentVolumeClaim> {
        let mut claim = claim(name, CLASS)?;
        claim.annotations_mut().extend(bound_annotations(self.node));
        claim.spec.get_or_insert_default().volume_name = Some(volume.to_owned());
        Ok(claim)
    }

    async fn patch_status(&self, name: &str) -> Result<()> {
        let status = json!({"status": {
            "phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": CLAIM_SIZE.quantity()},
        }});
        let params =
            PatchParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PatchParams::default() };
        let patched = self.api.patch_status(name, &params, &Patch::Merge(status)).await;
        patched.map_err(api_error).with_context(|| format!("write the status of claim {name}")).map(drop)
    }
}

/// Creates a claim as a user.
pub(super) async fn create(
    api: &Api<PersistentVolumeClaim>,
    claim: &PersistentVolumeClaim,
) -> Result<PersistentVolumeClaim> {
    let params = PostParams { field_manager: Some(USER.to_owned()), ..PostParams::default() };
    let created = api.create(&params, claim).await;
    created.map_err(api_error).with_context(|| format!("create claim {}", claim.name_any()))
}

/// Creates a claim as a user, and then selects its node as the scheduler does.
pub(super) async fn create_for_node(api: &Api<PersistentVolumeClaim>, name: &str, node: &str) -> Result<()> {
    create(api, &claim(name, CLASS)?).await?;
    patch(api, name, SCHEDULER, &annotated([(SELECTED_NODE, node)])).await
}

/// Annotates a claim with the name of the driver, as kube-controller-manager does when the claim waits for a volume.
pub(super) async fn annotate_with_driver(api: &Api<PersistentVolumeClaim>, name: &str) -> Result<()> {
    patch(api, name, CONTROLLER_MANAGER, &annotated(PROVISIONER.map(|key| (key, DRIVER)))).await
}

/// Deletes a claim as a user, and removes its finalizer as kube-controller-manager does. The finalizer protects claims in use. Until
/// it is removed, the claim is only marked as deleted.
pub(super) async fn delete(api: &Api<PersistentVolumeClaim>, name: &str) -> Result<()> {
    objects::delete(api, name).await?;
    patch(api, name, CONTROLLER_MANAGER, &json!({"metadata": {"finalizers": null}})).await
}

async fn patch(api: &Api<PersistentVolumeClaim>, name: &str, writer: &str, change: &Value) -> Result<()> {
    let params = PatchParams { field_manager: Some(writer.to_owned()), ..PatchParams::default() };
    let patched = api.patch(name, &params, &Patch::Merge(change)).await;
    patched.map_err(api_error).with_context(|| format!("patch claim {name}")).map(drop)
}

/// Returns a claim of a class as a user writes it.
pub(super) fn claim(name: &str, class: &str) -> Result<PersistentVolumeClaim> {
    workload::claim(name, class, CLAIM_SIZE, workload::VolumeMode::Filesystem, "ReadWriteOnce")
}

fn bound_annotations(node: &str) -> BTreeMap<String, String> {
    let selected = [(SELECTED_NODE, node)].into_iter();
    let annotations =
        selected.chain(PROVISIONER.map(|key| (key, DRIVER))).chain(BOUND.map(|key| (key, "yes")));
    annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Returns the merge patch that adds annotations.
fn annotated<const N: usize>(annotations: [(&str, &str); N]) -> Value {
    json!({"metadata": {"annotations": BTreeMap::from(annotations)}})
}

/// Returns a name as long as that of a provisioned volume, which has the UID of its claim.
fn volume_name(number: u64) -> String {
    format!("pvc-00000000-0000-4000-8000-{number:012}")
}
