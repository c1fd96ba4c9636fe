//! A VolumeSnapshot as the data source of a claim: finds the snapshot of the store that it refers to.
//!
//! The objects belong to the CSI snapshotter, which a cluster may not have. Their handle is the value that this driver's CSI
//! service returned: the snapshot's name in the store of its node. They are untrusted input: any user may have written them.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::core::DynamicObject;
use kube::{Api, ResourceExt};
use loopfs::Bytes;
use loopfs::volume_store::{OwnedContentSource, SnapshotId};
use serde::Deserialize;

use super::source::DataSource;
use crate::error::Error;
use crate::node::context::Context;
use crate::objects::identity::Identity;
use crate::objects::refusal::Refusal;
use crate::objects::snapshot::{self, MANAGED_BY};
use crate::objects::{ownership, quantity};

const NOT_READY: &str = "is not ready to use; it is copied once it is";

/// The fields of a VolumeSnapshot that are needed here.
#[derive(Debug, Default, Deserialize)]
struct VolumeSnapshotFields {
    status: Option<SnapshotStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SnapshotStatus {
    bound_volume_snapshot_content_name: Option<String>,
    ready_to_use: Option<bool>,
    restore_size: Option<String>,
}

/// The fields of a VolumeSnapshotContent that are needed here.
#[derive(Debug, Default, Deserialize)]
struct Content {
    #[serde(default)]
    spec: ContentSpec,
    status: Option<ContentStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContentSpec {
    driver: Option<String>,
    source_volume_mode: Option<String>,
    volume_snapshot_ref: Option<Reference>,
}

#[derive(Debug, Default, Deserialize)]
struct Reference {
    namespace: Option<String>,
    name: Option<String>,
    uid: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContentStatus {
    snapshot_handle: Option<String>,
    ready_to_use: Option<bool>,
}

/// Finds the snapshot of the store for the VolumeSnapshot with this name, which is the data source of `requester` and in the
/// same namespace.
pub(crate) async fn find_snapshot(
    name: &str,
    requester: &PersistentVolumeClaim,
    ctx: &Context,
) -> Result<DataSource, Error> {
    let namespace = requester.namespace().unwrap_or_default();
    let snapshots: Api<DynamicObject> = Api::namespaced_with(
        ctx.cluster.client.clone(),
        &namespace,
        &snapshot::resource(snapshot::KIND, "volumesnapshots"),
    );
    let snapshot = found(snapshots.get(name).await);
    let snapshot = snapshot.map_err(|error| Error::api("read VolumeSnapshot", name, error))?;
    let absent = "does not exist, or the cluster has no VolumeSnapshots";
    let snapshot = snapshot.ok_or_else(|| refused(name, absent))?;
    let bound = content_of(&snapshot)?;
    let contents: Api<DynamicObject> =
        Api::all_with(ctx.cluster.client.clone(), &snapshot::content_resource());
    let content = found(contents.get(&bound).await);
    let content = content.map_err(|error| Error::api("read VolumeSnapshotContent", &bound, error))?;
    let content = content.ok_or_else(|| refused(name, "has lost its VolumeSnapshotContent"))?;
    resolve(&snapshot, &content, &ctx.cluster.identity)
}

/// Returns `None` if the object does not exist. If its kind does not exist, the API server returns 404 without a reason.
fn found(response: kube::Result<DynamicObject>) -> kube::Result<Option<DynamicObject>> {
    match response {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        response => response.map(Some),
    }
}

fn refused(name: &str, why: &'static str) -> Refusal {
    Refusal::Source { source_object: format!("VolumeSnapshot {name:?}"), why }
}

fn read<T: for<'a> Deserialize<'a>>(object: &DynamicObject) -> Option<T> {
    T::deserialize(&object.data).ok()
}

/// Returns the name of the content that a snapshot is bound to.
pub(crate) fn content_of(snapshot: &DynamicObject) -> Result<String, Refusal> {
    let name = snapshot.name_any();
    if snapshot.metadata.deletion_timestamp.is_some() {
        return Err(refused(&name, "is being deleted"));
    }
    let status =
        read::<VolumeSnapshotFields>(snapshot).and_then(|snapshot| snapshot.status).unwrap_or_default();
    let content = status.bound_volume_snapshot_content_name.filter(|content| !content.is_empty());
    content.ok_or_else(|| refused(&name, NOT_READY))
}

/// Checks that a VolumeSnapshot can be copied, and returns its snapshot.
pub(crate) fn resolve(
    snapshot: &DynamicObject,
    content: &DynamicObject,
    identity: &Identity,
) -> Result<DataSource, Error> {
    let name = snapshot.name_any();
    let refused = |why| Error::from(refused(&name, why));
    let (Some(status), Some(Content { spec, status: content_status })) = (
        read::<VolumeSnapshotFields>(snapshot).and_then(|snapshot| snapshot.status),
        read::<Content>(content),
    ) else {
        return Err(refused("has an object that is not of the form of snapshot.storage.k8s.io/v1"));
    };
    if spec.driver.as_deref() != Some(identity.driver()) {
        return Err(refused("is of another driver"));
    }
    // Otherwise a user who can create a VolumeSnapshot could read the snapshots of other users.
    let names_it = spec.volume_snapshot_ref.is_some_and(|reference| {
        reference.uid.is_some()
            && reference.uid == snapshot.metadata.uid
            && reference.namespace == snapshot.metadata.namespace
            && reference.name == snapshot.metadata.name
    });
    if !names_it {
        return Err(refused("is bound to the VolumeSnapshotContent of another VolumeSnapshot"));
    }
    let content_status = content_status.unwrap_or_default();
    let managing_node = content.labels().get(MANAGED_BY);
    if status.ready_to_use != Some(true) || content_status.ready_to_use != Some(true) {
        return Err(match managing_node {
            Some(_) => refused(NOT_READY),
            None => Refusal::SnapshotUnmanaged { snapshot: name, content: content.name_any() }.into(),
        });
    }
    if let Some(node) = managing_node.filter(|node| *node != identity.node()) {
        return Err(Error::SourceElsewhere {
            source_object: format!("VolumeSnapshot {name:?}"),
            node: node.clone(),
        });
    }
    let handle = content_status.snapshot_handle.unwrap_or_default();
    let id = SnapshotId::parse(&handle).map_err(|error| ownership::InvalidHandle(error.to_string()))?;
    let size = status.restore_size.map(|size| quantity::parse(&Quantity(size))).transpose();
    Ok(DataSource {
        id: OwnedContentSource::Snapshot(id),
        // If the mode is unknown, the store refuses to create a Block volume from a directory.
        mode: spec.source_volume_mode,
        capacity: size.map_err(Refusal::Size)?.unwrap_or(Bytes(0)),
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    fn snapshot(change: Value) -> DynamicObject {
        let mut object = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": {"name": "before", "namespace": "shop", "uid": "snapshot-uid"},
            "spec": {"source": {"persistentVolumeClaimName": "data"}},
            "status": {"boundVolumeSnapshotContentName": "content", "readyToUse": true, "restoreSize": "1Mi"},
        });
        fixtures::merge_keeping_nulls(&mut object, change);
        serde_json::from_value(object).unwrap()
    }

    fn content(change: Value) -> DynamicObject {
        let mut object = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {"name": "content"},
            "spec": {
                "driver": "csi.loopfs.dev", "sourceVolumeMode": "Filesystem", "deletionPolicy": "Delete",
                "volumeSnapshotRef": {"name": "before", "namespace": "shop", "uid": "snapshot-uid"},
            },
            "status": {"snapshotHandle": "snapshot-1", "readyToUse": true},
        });
        fixtures::merge_keeping_nulls(&mut object, change);
        serde_json::from_value(object).unwrap()
    }

    #[rstest]
    #[case::ready(json!({}), Ok("content"))]
    #[case::being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), Err("being deleted"))]
    #[case::not_ready(json!({"status": {"readyToUse": false}}), Ok("content"))]
    #[case::unbound(json!({"status": {"boundVolumeSnapshotContentName": null}}), Err("not ready"))]
    #[case::no_status(json!({"status": null}), Err("not ready"))]
    #[case::nonsense(json!({"status": {"readyToUse": "yes"}}), Err("not ready"))]
    fn contents(#[case] change: Value, #[case] expected: Result<&str, &str>) {
        match (content_of(&snapshot(change)), expected) {
            (Ok(name), Ok(expected)) => assert_eq!(name, expected),
            (Err(why), Err(expected)) => assert!(why.to_string().contains(expected), "{why}"),
            other => panic!("{other:?}"),
        }
    }

    #[rstest]
    #[case::other_driver(json!({"spec": {"driver": "csi.other.dev"}}), "another driver")]
    #[case::other_snapshot(json!({"spec": {"volumeSnapshotRef": {"uid": "another"}}}), "of another VolumeSnapshot")]
    #[case::of_the_bank(json!({"spec": {"volumeSnapshotRef": {"namespace": "bank"}}}), "of another VolumeSnapshot")]
    #[case::without_uid(json!({"spec": {"volumeSnapshotRef": {"uid": null}}}), "of another VolumeSnapshot")]
    #[case::unreferenced(json!({"spec": {"volumeSnapshotRef": null}}), "of another VolumeSnapshot")]
    #[case::not_ready(json!({"metadata": {"labels": {MANAGED_BY: "node-b"}}, "status": {"readyToUse": false}}), "not ready")]
    #[case::no_status(json!({"metadata": {"labels": {MANAGED_BY: "node-b"}}, "status": null}), "not ready")]
    #[case::managed_by_no_node(json!({"status": null}), "VolumeSnapshotContent \"content\" lacks the label snapshot.storage.kubernetes.io/managed-by")]
    #[case::elsewhere(json!({"metadata": {"labels": {MANAGED_BY: "node-b"}}}), "on node \"node-b\"")]
    #[case::path(json!({"status": {"snapshotHandle": "../../etc"}}), "handle")]
    #[case::no_handle(json!({"status": {"snapshotHandle": null}}), "handle")]
    #[case::nonsense(json!({"spec": {"driver": 7}}), "not of the form")]
    fn uncopyable_snapshots_are_refused(#[case] change: Value, #[case] why: &str) {
        let error = resolve(&snapshot(json!({})), &content(change), &fixtures::identity()).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }

    #[test]
    fn unready_snapshot_is_refused() {
        let snapshot = snapshot(json!({"status": {"readyToUse": false}}));
        let error = resolve(&snapshot, &content(json!({})), &fixtures::identity()).unwrap_err();
        assert!(error.to_string().contains("lacks the label"), "{error}");
    }

    #[rstest]
    #[case::managed_by_no_node(json!({}), Some("Filesystem"))]
    #[case::managed_here(json!({"metadata": {"labels": {MANAGED_BY: "node-a"}}}), Some("Filesystem"))]
    #[case::unknown_mode(json!({"spec": {"sourceVolumeMode": null}}), None)]
    fn snapshot_resolves_by_its_content(#[case] change: Value, #[case] mode: Option<&str>) {
        let found = resolve(&snapshot(json!({})), &content(change), &fixtures::identity()).unwrap();
        let id = OwnedContentSource::Snapshot(SnapshotId::parse("snapshot-1").unwrap());
        assert_eq!(found, DataSource { id, mode: mode.map(str::to_owned), capacity: Bytes(1 << 20) });
    }
}
