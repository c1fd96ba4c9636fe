//! Tests of claims with a VolumeSnapshot as their data source. The tests write the objects that the snapshotter would write.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionCondition,
};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use loopfs::volume_store::{SnapshotId, VolumeId, VolumeKind};

use super::*;

const GROUP: &str = "snapshot.storage.k8s.io";

/// Returns the smallest valid definition of a snapshot kind.
fn definition(kind: &str, plural: &str, scope: &str) -> Value {
    let anything = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let name = format!("{plural}.{GROUP}");
    json!({
        "metadata": {"name": name, "annotations": {
            "api-approved.kubernetes.io": "https://github.com/kubernetes-csi/external-snapshotter/pull/814",
        }},
        "spec": {
            "group": GROUP, "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase(), "listKind": format!("{kind}List")},
            "versions": [{
                "name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": &anything, "status": &anything}}},
            }],
        },
    })
}

impl Cluster {
    async fn define(&self, kind: &str, plural: &str, scope: &str) -> ApiResource {
        let definitions: Api<CustomResourceDefinition> = Api::all(self.admin.clone());
        let created = create(&definitions, definition(kind, plural, scope)).await;
        until(&definitions, &created.name_any(), |definition| {
            let conditions = definition.status.as_ref().and_then(|status| status.conditions.as_ref());
            let established = |condition: &CustomResourceDefinitionCondition| {
                condition.type_ == "Established" && condition.status == "True"
            };
            conditions.is_some_and(|conditions| conditions.iter().any(established))
        })
        .await;
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, "v1", kind), plural)
    }
}

/// Creates an object with its status, as a user and the snapshotter write it.
async fn create_with_status(api: &Api<DynamicObject>, name: &str, object: Value) -> DynamicObject {
    let status = json!({"status": object["status"]});
    let created: DynamicObject = serde_json::from_value(object).unwrap();
    // The definition may be established before it is served.
    let created =
        eventually(name, || async { api.create(&PostParams::default(), &created).await.ok() }).await;
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    created
}

#[tokio::test]
async fn a_claim_is_copied_from_a_snapshot() {
    let cluster = Cluster::connect().await;
    let provisioner = cluster.provisioner().await;
    let from = |snapshot: &str| json!({"spec": {"dataSource": {"apiGroup": GROUP, "kind": "VolumeSnapshot", "name": snapshot}}});
    cluster.claim("early", from("before")).await;
    cluster.event_that("early", "ProvisioningFailed", "the cluster has no VolumeSnapshots").await;

    let snapshots = cluster.define("VolumeSnapshot", "volumesnapshots", "Namespaced").await;
    let contents = cluster.define("VolumeSnapshotContent", "volumesnapshotcontents", "Cluster").await;
    let snapshots: Api<DynamicObject> =
        Api::namespaced_with(cluster.admin.clone(), &cluster.namespace, &snapshots);
    let contents: Api<DynamicObject> = Api::all_with(cluster.admin.clone(), &contents);
    let handle = SnapshotId::parse(&format!("snapshot-{}", cluster.namespace)).unwrap();
    cluster.volumes.state().snapshots.insert(handle.clone(), VolumeKind::Filesystem);
    let snapshot = |name: &str| {
        json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": {"name": name},
            "spec": {"source": {"persistentVolumeClaimName": "data"}},
            "status": {"boundVolumeSnapshotContentName": &cluster.namespace, "readyToUse": true, "restoreSize": "1Mi"},
        })
    };
    let before = create_with_status(&snapshots, "before", snapshot("before")).await;
    let content = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": {"name": &cluster.namespace},
        "spec": {
            "driver": fixtures::identity().driver(), "deletionPolicy": "Delete", "sourceVolumeMode": "Filesystem",
            "source": {"volumeHandle": "pvc-data"},
            "volumeSnapshotRef": {"name": "before", "namespace": &cluster.namespace, "uid": before.uid()},
        },
        "status": {"snapshotHandle": handle.as_str(), "readyToUse": true},
    });
    create_with_status(&contents, &cluster.namespace, content).await;

    cluster.claim("restored", from("before")).await;
    let restored = cluster.bound("restored").await;
    let id = VolumeId::parse(&restored.name_any()).unwrap();
    let source = cluster.volumes.state().copies.get(&id).cloned();
    assert_eq!(source, Some(format!("snapshot {handle}")));
    // The earlier claim is retried.
    cluster.bound("early").await;

    // This VolumeSnapshot of one user names the content of another user.
    create_with_status(&snapshots, "stolen", snapshot("stolen")).await;
    cluster.claim("thief", from("stolen")).await;
    cluster.event_that("thief", "ProvisioningFailed", "of another VolumeSnapshot").await;
    let mut device = from("before");
    device["spec"]["volumeMode"] = json!("Block");
    cluster.claim("device", device).await;
    cluster.event_that("device", "ProvisioningFailed", "volumeMode is \"Filesystem\"").await;

    for claim in ["thief", "device", "early", "restored"] {
        cluster.delete_claim(claim).await;
    }
    cluster.wait_until_deleted(&cluster.objects(), id.as_str()).await;
    provisioner.stop().await;
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.admin.clone());
    for plural in ["volumesnapshots", "volumesnapshotcontents"] {
        definitions.delete(&format!("{plural}.{GROUP}"), &DeleteParams::default()).await.unwrap();
    }
    cluster.finish([]).await;
}
