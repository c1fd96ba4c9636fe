//! The names of the kinds of snapshots, which belong to the CSI snapshotter.

use kube::core::{ApiResource, GroupVersionKind};

pub(crate) const GROUP: &str = "snapshot.storage.k8s.io";
pub(crate) const KIND: &str = "VolumeSnapshot";

/// The label on the content of a snapshot that names the node whose snapshotter manages it.
pub(crate) const MANAGED_BY: &str = "snapshot.storage.kubernetes.io/managed-by";

/// Returns the resource of VolumeSnapshotContents.
pub(crate) fn content_resource() -> ApiResource {
    resource("VolumeSnapshotContent", "volumesnapshotcontents")
}

/// Returns a resource of the group.
pub(crate) fn resource(kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, "v1", kind), plural)
}
