//! Changes of objects of the API.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicyBinding;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod, PodSpec};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::api::DeleteParams;
use kube::core::ObjectMeta;
use kube::{Api, ResourceExt};
use serde_json::json;
use testvm_cluster::api_error::api_error;
use testvm_cluster::objects;
use tokio::time::sleep;

use crate::e2e::stories::{claim_labels, node_loss, second_node};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::workload::{FLOW, FLOW_POD};

const POLL_INTERVAL: Duration = Duration::from_millis(500);
use crate::test_env::{claims, pods};

/// Has the pod of the flow mount its read-only volume writable.
pub(super) async fn mount_flow_writable(env: &TestEnv<'_>) -> Result<()> {
    let sets = env.stateful_sets();
    let mut set = objects::read(&sets, FLOW).await?;
    sets.delete(FLOW, &DeleteParams::background()).await.map_err(api_error).context("delete it")?;
    // The controller may delete the pod first.
    drop(pods::end(env, FLOW_POD).await);
    let pod = set.spec.get_or_insert_default().template.spec.get_or_insert_default();
    mount_writable(pod);
    set = StatefulSet { metadata: named(FLOW), spec: set.spec, status: None };
    objects::create(&sets, &set).await.map(drop)
}

/// Replaces the pod with the read-only claim by one that has it writable.
pub(super) async fn mount_claim_writable(env: &TestEnv<'_>) -> Result<()> {
    replace_pod(env, "read-only-filesystem-reader", mount_writable).await
}

/// Replaces the pod with a user namespace of its own by one without.
pub(super) async fn use_host_users(env: &TestEnv<'_>) -> Result<()> {
    replace_pod(env, "own-users", |pod| {
        pod.host_users = None;
        pod.runtime_class_name = None;
    })
    .await
}

/// Replaces the pod under gVisor by one of the runtime of the node.
pub(super) async fn use_host_kernel(env: &TestEnv<'_>) -> Result<()> {
    replace_pod(env, "gvisor", |pod| pod.runtime_class_name = None).await
}

/// Has an object say that the second node, which has no storage, has some.
pub(super) async fn publish_capacity(env: &TestEnv<'_>) -> Result<()> {
    let second = other_nodes(env).await?.pop().context("there is no second node")?;
    let capacity: CSIStorageCapacity = serde_json::from_value(json!({
        "metadata": {"name": "sabotage"},
        "storageClassName": env.driver.class_name(),
        "nodeTopology": {"matchLabels": {"node": second}},
        "capacity": "1Gi",
        "maximumVolumeSize": "1Gi",
    }))?;
    let capacities = Api::namespaced(env.client.clone(), &env.namespace);
    objects::create(&capacities, &capacity).await.map(drop)
}

/// Removes the nodes that the story has stopped.
pub(super) async fn remove_other_nodes(env: &TestEnv<'_>) -> Result<()> {
    for name in other_nodes(env).await? {
        second_node::delete(env, &name).await?;
    }
    Ok(())
}

/// Has the driver keep the claim of the story node-loss.
pub(super) async fn retain_on_node_loss(env: &TestEnv<'_>) -> Result<()> {
    let volume = claims::volume_of(env, node_loss::CLAIM).await?.name_any();
    let retain = json!({"metadata": {"annotations": {"csi.loopfs.dev/on-node-loss": "retain"}}});
    claims::patch_volume(env, &volume, &retain).await
}

/// Deletes that PersistentVolume, whose node does not run any more.
pub(super) async fn remove_lost_volume(env: &TestEnv<'_>) -> Result<()> {
    let volumes = claims::volumes(env);
    let volume = claims::volume_of(env, node_loss::CLAIM).await?.name_any();
    objects::delete(&volumes, &volume).await?;
    claims::patch_volume(env, &volume, &json!({"metadata": {"finalizers": null}})).await
}

/// Stops the controller, deletes the binding of the policy that labels claims, and removes the labels.
pub(super) async fn remove_labels(env: &TestEnv<'_>) -> Result<()> {
    claim_labels::scale_controller(env, 0).await?;
    let bindings: Api<MutatingAdmissionPolicyBinding> = Api::all(env.client.clone());
    let policy = "loopfs-claim-labels";
    objects::delete(&bindings, policy).await?;
    let label = format!("{}/node", env.driver.name);
    let patch = json!({"metadata": {"labels": {&label: null}}});
    let deadline = Instant::now() + env.timeouts.end;
    for claim in objects::list(&env.claims(), "").await? {
        // The API server applies the policy until it has noticed the deletion, which no event announces.
        while objects::patch(&env.claims(), &claim.name_any(), &patch).await?.labels().contains_key(&label) {
            anyhow::ensure!(Instant::now() < deadline, "the API server still applies the policy {policy}");
            sleep(POLL_INTERVAL).await;
        }
    }
    Ok(())
}

/// Returns the names of all nodes but the first.
async fn other_nodes(env: &TestEnv<'_>) -> Result<Vec<String>> {
    let first = env.node.context(FOREIGN_NODE)?.name();
    let nodes: Api<NodeObject> = Api::all(env.client.clone());
    let nodes = objects::list(&nodes, "").await?;
    Ok(nodes.iter().map(ResourceExt::name_any).filter(|name| name != first).collect())
}

/// Replaces a pod by one of the same name with a change.
async fn replace_pod(env: &TestEnv<'_>, name: &str, change: impl FnOnce(&mut PodSpec)) -> Result<()> {
    let pod = objects::read(&env.pods(), name).await?;
    pods::end(env, name).await?;
    let mut spec = pod.spec.context("the pod has no spec")?;
    change(&mut spec);
    pods::create(env, &Pod { metadata: named(name), spec: Some(spec), status: None }).await
}

fn mount_writable(pod: &mut PodSpec) {
    for volume in pod.volumes.iter_mut().flatten() {
        if let Some(claim) = &mut volume.persistent_volume_claim {
            claim.read_only = None;
        }
    }
    let mounts = pod.containers.iter_mut().flat_map(|container| container.volume_mounts.iter_mut().flatten());
    for mount in mounts.filter(|mount| mount.mount_path.starts_with("/vol")) {
        mount.read_only = None;
    }
}

fn named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }
}
