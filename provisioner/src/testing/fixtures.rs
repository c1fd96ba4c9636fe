//! Objects for tests, as a real cluster holds them, and changes to them as merge patches.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::objects::identity::Identity;

pub(crate) const CLAIM_UID: &str = "0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";
pub(crate) const VOLUME: &str = "pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";
pub(crate) const FILESYSTEM: &str = "8d1f0b5e-61a0-4b3c-9d57-0f3c8f5f2b10";

pub(crate) fn identity() -> Identity {
    Identity::new("csi.loopfs.dev", "node-a").unwrap()
}

/// Returns an object as the API server sends it to a client that asks only for metadata.
pub(crate) fn metadata_only(metadata: impl Serialize) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata})
}

/// Returns a list of such objects.
pub(crate) fn metadata_list(of_each: impl IntoIterator<Item = impl Serialize>) -> Value {
    let items: Vec<_> = of_each.into_iter().map(metadata_only).collect();
    json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": {}, "items": items})
}

/// Returns an unbound 1Mi Filesystem claim of this node.
pub(crate) fn claim(change: Value) -> PersistentVolumeClaim {
    object(
        json!({
            "metadata": {
                "name": "data", "namespace": "shop", "uid": CLAIM_UID, "resourceVersion": "100",
                "annotations": {
                    "volume.kubernetes.io/storage-provisioner": "csi.loopfs.dev",
                    "volume.kubernetes.io/selected-node": "node-a",
                },
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "loopfs", "volumeMode": "Filesystem",
                "resources": { "requests": { "storage": "1Mi" } },
            },
            "status": { "phase": "Pending" },
        }),
        change,
    )
}

/// Returns [`claim`], bound to [`volume`].
pub(crate) fn bound_claim(change: Value) -> PersistentVolumeClaim {
    let mut bound = json!({
        "spec": { "volumeName": VOLUME },
        "status": { "phase": "Bound", "capacity": { "storage": "1Mi" }, "accessModes": ["ReadWriteOnce"] },
    });
    merge_keeping_nulls(&mut bound, change);
    claim(bound)
}

pub(crate) fn class(change: Value) -> StorageClass {
    object(
        json!({
            "metadata": { "name": "loopfs", "resourceVersion": "5" },
            "provisioner": "csi.loopfs.dev", "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer",
            "allowVolumeExpansion": true, "mountOptions": ["nosuid", "nodev"],
        }),
        change,
    )
}

/// Returns a PersistentVolume that can be only on this node.
pub(crate) fn volume_on(node: &str, change: Value) -> PersistentVolume {
    let key = "topology.csi.loopfs.dev/node";
    let terms = json!([{"matchExpressions": [{"key": key, "operator": "In", "values": [node]}]}]);
    let mut whole = json!({
        "metadata": {"labels": {"csi.loopfs.dev/node": node}},
        "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}},
    });
    merge_keeping_nulls(&mut whole, change);
    volume(whole)
}

/// Returns the PersistentVolume of [`claim`].
pub(crate) fn volume(change: Value) -> PersistentVolume {
    object(
        json!({
            "metadata": {
                "name": VOLUME, "uid": "volume-uid", "resourceVersion": "200",
                "labels": { "csi.loopfs.dev/node": "node-a" },
                "annotations": { "pv.kubernetes.io/provisioned-by": "csi.loopfs.dev" },
                "finalizers": ["kubernetes.io/pv-protection", "external-provisioner.volume.kubernetes.io/finalizer"],
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Mi" }, "volumeMode": "Filesystem",
                "storageClassName": "loopfs", "persistentVolumeReclaimPolicy": "Delete",
                "mountOptions": ["nosuid", "nodev"],
                "claimRef": {
                    "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "shop", "name": "data",
                    "uid": CLAIM_UID,
                },
                "csi": {
                    "driver": "csi.loopfs.dev", "fsType": "xfs", "volumeHandle": VOLUME,
                    "volumeAttributes": { "csi.loopfs.dev/filesystem-uuid": FILESYSTEM },
                },
                "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [
                    { "key": "topology.csi.loopfs.dev/node", "operator": "In", "values": ["node-a"] },
                ] }] } },
            },
            "status": { "phase": "Bound" },
        }),
        change,
    )
}

fn object<K: DeserializeOwned>(mut base: Value, change: Value) -> K {
    merge(&mut base, change);
    serde_json::from_value(base).unwrap()
}

/// Returns the change of [`volume`] to one on the disk of another node.
pub(crate) fn on_another_node() -> Value {
    json!({
        "metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}},
        "spec": {"csi": {"volumeAttributes": {"csi.loopfs.dev/filesystem-uuid": "00000000-0000-4000-8000-000000000000"}}},
    })
}

/// Applies a JSON merge patch (RFC 7386), in which null removes a member.
pub(crate) fn merge(base: &mut Value, change: Value) {
    match (base, change) {
        (Value::Object(base), Value::Object(change)) => {
            for (key, value) in change {
                if value.is_null() {
                    base.remove(&key);
                } else {
                    merge(base.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (base, change) => *base = change,
    }
}

/// Merges two patches into one that has the effect of both. A null stays, because it removes a member later.
pub(crate) fn merge_keeping_nulls(base: &mut Value, change: Value) {
    match (base, change) {
        (Value::Object(base), Value::Object(change)) => {
            for (key, value) in change {
                merge_keeping_nulls(base.entry(key).or_insert(Value::Null), value);
            }
        }
        (base, change) => *base = change,
    }
}
