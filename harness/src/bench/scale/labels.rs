//! The component claim-labels: its objects, and the record with which nodes watch only their own claims.

use anyhow::{Context, Result};
use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicyBinding;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use testvm_cluster::api_error::api_error;

use crate::fake_nodes::SYSTEM;
use crate::test_env::claim_labels::{BINDING_UID, NAME};
use crate::test_env::manifests::Manifests;

/// Applies the objects, and writes the record. The controller writes it when all claims are labelled, and there are none yet.
pub(super) async fn install(client: &Client, manifests: &Manifests) -> Result<()> {
    manifests.apply(client).await?;
    let bindings: Api<MutatingAdmissionPolicyBinding> = Api::all(client.clone());
    let binding = bindings.get(NAME).await.map_err(api_error).context("read the binding of the policy")?;
    let uid = binding.metadata.uid.context("the binding of the policy has no UID")?;
    let records: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM);
    let record = json!({"data": {BINDING_UID: uid}});
    let written = records.patch(NAME, &PatchParams::default(), &Patch::Merge(record)).await;
    written.map_err(api_error).context("write the record of labelled claims").map(drop)
}
