//! The PersistentVolume of a volume.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, ObjectReference,
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use loopfs::Bytes;
use loopfs::volume_store::{VolumeId, VolumeKind};
use serde_json::{Value, json};

use crate::objects::claim_status::STORAGE;
use crate::objects::identity::Identity;
use crate::objects::loss_policy::Policy;
use crate::objects::quantity;

/// The annotation from which kube-controller-manager knows that this driver deletes the data.
pub(crate) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// The finalizer that keeps a PersistentVolume until its data is deleted, under the name that external-provisioner uses. Only
/// PersistentVolumes with reclaim policy Delete have it: users may delete a retained one at any time.
pub(crate) const FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";

/// The file system of the volumes that are directories.
const FILE_SYSTEM: &str = "xfs";

/// The treatment of a volume whose claim was deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReclaimPolicy {
    Delete,
    Retain,
}

impl ReclaimPolicy {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ReclaimPolicy::Delete => "Delete",
            ReclaimPolicy::Retain => "Retain",
        }
    }
}

/// The values from which a PersistentVolume is built.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Description<'a> {
    pub(crate) claim: &'a PersistentVolumeClaim,
    pub(crate) id: &'a VolumeId,
    pub(crate) kind: VolumeKind,
    /// The capacity that the store returned, which may be slightly more than requested.
    pub(crate) capacity: Bytes,
    pub(crate) filesystem_uuid: String,
    pub(crate) reclaim_policy: ReclaimPolicy,
    pub(crate) mount_options: Option<Vec<String>>,
    pub(crate) node_loss: Policy,
}

pub(crate) fn build(description: Description<'_>, identity: &Identity) -> PersistentVolume {
    let Description { claim, id, kind, capacity, filesystem_uuid, reclaim_policy, mount_options, node_loss } =
        description;
    let mut annotations = node_loss.annotations(identity);
    annotations.insert(PROVISIONED_BY.to_owned(), identity.driver().to_owned());
    let claim_spec = claim.spec.as_ref();
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(id.to_string()),
            labels: Some(BTreeMap::from([(identity.node_label(), identity.node().to_owned())])),
            annotations: Some(annotations),
            finalizers: (reclaim_policy == ReclaimPolicy::Delete).then(|| vec![FINALIZER.to_owned()]),
            ..Default::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: claim_spec.and_then(|spec| spec.access_modes.clone()),
            capacity: Some(BTreeMap::from([(STORAGE.to_owned(), quantity::format(capacity))])),
            claim_ref: Some(claim_reference(claim)),
            csi: Some(CSIPersistentVolumeSource {
                driver: identity.driver().to_owned(),
                // While the CSIDriver does not exist, the kubelet applies the fsGroup of a pod only to volumes with a file system type.
                fs_type: (kind == VolumeKind::Filesystem).then(|| FILE_SYSTEM.to_owned()),
                volume_handle: id.to_string(),
                volume_attributes: Some(BTreeMap::from([(
                    identity.filesystem_uuid_attribute(),
                    filesystem_uuid,
                )])),
                ..Default::default()
            }),
            mount_options,
            node_affinity: Some(VolumeNodeAffinity { required: Some(only_on_this_node(identity)) }),
            persistent_volume_reclaim_policy: Some(reclaim_policy.as_str().to_owned()),
            storage_class_name: claim_spec.and_then(|spec| spec.storage_class_name.clone()),
            volume_mode: Some(kind.to_string()),
            ..Default::default()
        }),
        status: None,
    }
}

/// Returns the kind of volume that a volume mode of Kubernetes names.
pub(crate) fn kind_of_mode(mode: &str) -> Option<VolumeKind> {
    [VolumeKind::Filesystem, VolumeKind::Block].into_iter().find(|kind| kind.to_string() == mode)
}

/// Returns the reference to the claim. It contains the UID, so that a newer claim of the same name does not get the data of the
/// old one.
fn claim_reference(claim: &PersistentVolumeClaim) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        namespace: claim.metadata.namespace.clone(),
        name: claim.metadata.name.clone(),
        uid: claim.metadata.uid.clone(),
        // The resource version would only record which version of the claim was read; the binder compares UIDs.
        ..Default::default()
    }
}

fn only_on_this_node(identity: &Identity) -> NodeSelector {
    NodeSelector {
        node_selector_terms: vec![NodeSelectorTerm {
            match_expressions: Some(vec![NodeSelectorRequirement {
                key: identity.topology_key(),
                operator: "In".to_owned(),
                values: Some(vec![identity.node().to_owned()]),
            }]),
            match_fields: None,
        }],
    }
}

/// Returns `true` if the data of a PersistentVolume has to be deleted: its reclaim policy is Delete, and either its claim was
/// deleted, or no claim has bound it and the PersistentVolume is being deleted.
pub(crate) fn is_discarded(volume: &PersistentVolume) -> bool {
    let is_deleted = volume.metadata.deletion_timestamp.is_some();
    let is_released = phase(volume) == Some("Released");
    has_delete_policy(volume) && (is_released || phase(volume) == Some("Available") && is_deleted)
}

pub(crate) fn has_delete_policy(volume: &PersistentVolume) -> bool {
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    policy == Some(ReclaimPolicy::Delete.as_str())
}

pub(crate) fn has_finalizer(volume: &PersistentVolume) -> bool {
    volume.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
}

pub(crate) fn phase(volume: &PersistentVolume) -> Option<&str> {
    volume.status.as_ref()?.phase.as_deref()
}

/// Returns the patch that adds or removes this driver's finalizer and leaves all others unchanged.
///
/// It is a strategic merge patch, which names one entry and not the whole list. kube-controller-manager removes its own
/// finalizer at the moment when a PersistentVolume is marked for deletion, so with a resource version as a precondition most
/// patches would end in a conflict.
pub(crate) fn finalizer_patch(volume: &PersistentVolume, present: bool) -> Value {
    let directive = if present { "finalizers" } else { "$deleteFromPrimitiveList/finalizers" };
    json!({ "metadata": { "uid": volume.metadata.uid, directive: [FINALIZER] } })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    fn described<'a>(claim: &'a PersistentVolumeClaim, id: &'a VolumeId) -> Description<'a> {
        Description {
            claim,
            id,
            kind: VolumeKind::Filesystem,
            capacity: Bytes(1 << 20),
            filesystem_uuid: fixtures::FILESYSTEM.to_owned(),
            reclaim_policy: ReclaimPolicy::Delete,
            mount_options: Some(vec!["nosuid".to_owned(), "nodev".to_owned()]),
            node_loss: Policy::default(),
        }
    }

    #[test]
    fn a_built_persistent_volume_is_complete() {
        let claim = fixtures::claim(json!({}));
        let id = VolumeId::parse(fixtures::VOLUME).unwrap();
        let built = serde_json::to_value(build(described(&claim, &id), &fixtures::identity())).unwrap();
        let mut expected = serde_json::to_value(fixtures::volume(json!({}))).unwrap();
        // Fields that the API server and its controllers add.
        fixtures::merge(
            &mut expected,
            json!({
                "metadata": {"uid": Value::Null, "resourceVersion": Value::Null, "finalizers": [FINALIZER]},
                "status": Value::Null,
            }),
        );
        assert_eq!(built, expected);
    }

    #[test]
    fn only_directory_has_file_system_type() {
        let claim = fixtures::claim(json!({}));
        let id = VolumeId::parse(fixtures::VOLUME).unwrap();
        for (kind, expected) in [(VolumeKind::Filesystem, Some("xfs")), (VolumeKind::Block, None)] {
            let built = build(Description { kind, ..described(&claim, &id) }, &fixtures::identity());
            assert_eq!(built.spec.unwrap().csi.unwrap().fs_type.as_deref(), expected);
        }
    }
}
