//! PersistentVolumeClaims of a story, and their PersistentVolumes.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use testvm_cluster::waiting::{State, until_one};
use testvm_cluster::{objects, workload};

use super::environment::TestEnv;
use super::sizes::Size;
use super::workload::{VolumeMode, claim};

/// The annotation by which the scheduler tells the provisioner the node of the first pod.
pub(crate) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// Returns the claim as if the scheduler had chosen the node for its first pod.
pub(crate) fn with_selected_node(mut claim: PersistentVolumeClaim, node: &str) -> PersistentVolumeClaim {
    claim.annotations_mut().insert(SELECTED_NODE.into(), node.into());
    claim
}

pub(crate) fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound")
}

pub(crate) fn volumes(env: &TestEnv<'_>) -> Api<PersistentVolume> {
    Api::all(env.client.clone())
}

/// Returns the names of the claims that have PersistentVolumes: sorted, and once for each PersistentVolume.
pub(crate) async fn with_objects(env: &TestEnv<'_>) -> Result<Vec<String>> {
    let objects = objects::list(&volumes(env), "").await?;
    let claims = objects.iter().filter_map(|volume| volume.spec.as_ref()?.claim_ref.as_ref()?.name.clone());
    let mut names: Vec<String> = claims.collect();
    names.sort();
    Ok(names)
}

pub(crate) async fn create(
    env: &TestEnv<'_>,
    claim: &PersistentVolumeClaim,
) -> Result<PersistentVolumeClaim> {
    objects::create(&env.claims(), claim).await
}

/// Returns a claim of the driver's class with the access mode ReadWriteOnce.
pub(crate) fn claim_of_driver(
    env: &TestEnv<'_>,
    name: &str,
    size: Size,
    mode: VolumeMode,
) -> Result<PersistentVolumeClaim> {
    claim(name, &env.driver.class_name(), size, mode, "ReadWriteOnce")
}

/// Creates a claim like [`claim_of_driver`].
pub(crate) async fn request(
    env: &TestEnv<'_>,
    name: &str,
    size: Size,
    mode: VolumeMode,
) -> Result<PersistentVolumeClaim> {
    create(env, &claim_of_driver(env, name, size, mode)?).await
}

/// Creates a claim like [`request`], for which this node is selected already.
pub(crate) async fn request_on(
    env: &TestEnv<'_>,
    node: &str,
    name: &str,
    size: Size,
    mode: VolumeMode,
) -> Result<PersistentVolumeClaim> {
    create(env, &with_selected_node(claim_of_driver(env, name, size, mode)?, node)).await
}

/// Requests another size of the claim.
pub(crate) async fn request_size(env: &TestEnv<'_>, claim: &str, size: Size) -> Result<()> {
    let patch = json!({"spec": {"resources": {"requests": {"storage": size.quantity()}}}});
    objects::patch(&env.claims(), claim, &patch).await.map(drop)
}

/// Waits until the claim's status has the size and no resize in progress.
pub(crate) async fn until_expanded(env: &TestEnv<'_>, claim: &str, size: Size) -> Result<()> {
    let asked = Quantity(size.quantity());
    let waited = until_one(env.claims(), claim, env.timeouts.grow, |claim| {
        let status = claim.and_then(|claim| claim.status.as_ref());
        let capacity = status.and_then(|status| status.capacity.as_ref()?.get("storage"));
        let state = claim.and_then(resize_state);
        let settled = capacity == Some(&asked) && state.is_none();
        State::ready_if(settled, format!("it has {capacity:?}, and its resize is {state:?}"))
    });
    waited.await.with_context(|| format!("claim {claim} is not given {}", asked.0)).map(drop)
}

/// Returns the state of the claim's resize, or `None` if none is in progress.
pub(crate) fn resize_state(claim: &PersistentVolumeClaim) -> Option<&str> {
    let states = claim.status.as_ref()?.allocated_resource_statuses.as_ref()?;
    states.get("storage").map(String::as_str)
}

pub(crate) async fn delete(env: &TestEnv<'_>, claim: &str) -> Result<()> {
    objects::delete(&env.claims(), claim).await
}

/// Deletes a bound claim, and waits until its PersistentVolume is deleted.
pub(crate) async fn delete_with_volume(env: &TestEnv<'_>, claim: &str) -> Result<()> {
    workload::delete_claim(&env.client, &env.claims(), claim, env.timeouts.end).await
}

/// Returns the PersistentVolume of a bound claim.
pub(crate) async fn volume_of(env: &TestEnv<'_>, claim: &str) -> Result<PersistentVolume> {
    let name = workload::volume_of(&env.claims(), claim).await?;
    objects::read(&volumes(env), &name).await
}

pub(crate) async fn patch_volume(env: &TestEnv<'_>, volume: &str, change: &Value) -> Result<()> {
    objects::patch(&volumes(env), volume, change).await.map(drop)
}

/// Waits until the volume is released, and returns it.
pub(crate) async fn released(env: &TestEnv<'_>, volume: &str) -> Result<PersistentVolume> {
    until_one(volumes(env), volume, env.timeouts.end, |volume| {
        let status = volume.and_then(|volume| volume.status.as_ref());
        let phase = status.and_then(|status| status.phase.as_deref());
        State::ready_if(phase == Some("Released"), format!("it is {phase:?}"))
    })
    .await
    .with_context(|| format!("volume {volume} is not released"))?
    .context("the volume is gone")
}

/// Waits until the PersistentVolume is deleted.
pub(crate) async fn gone(env: &TestEnv<'_>, volume: &str) -> Result<()> {
    objects::until_gone(volumes(env), volume, env.timeouts.end).await
}
