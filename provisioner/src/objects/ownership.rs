//! Decides which objects belong to this driver and this node. Pure; the functions accept every object that an API server can hold.
//!
//! A cluster has one provisioner on each node, and other drivers. This process never changes an object that these functions
//! reject.

use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, NodeSelectorTerm, ObjectReference, PersistentVolume, PersistentVolumeClaim,
};
use loopfs::volume_store::VolumeId;
use serde_json::{Value, json};

use crate::objects::identity::Identity;
use crate::objects::pv;
use crate::objects::refusal::Refusal;

/// The annotation that kube-controller-manager sets on a claim which waits for an external provisioner: the provisioner's name.
pub(crate) const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";

/// The name of the same annotation in older versions of kube-controller-manager.
pub(crate) const STORAGE_PROVISIONER_BETA: &str = "volume.beta.kubernetes.io/storage-provisioner";

/// The annotation with the node that provisions. The scheduler sets it on a claim of a WaitForFirstConsumer class, to the node of its first
/// pod, and the controller on a claim of an Immediate class.
pub(crate) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// Returns `true` if the claim waits for a volume of this driver, on whatever node: the placement is decided elsewhere.
pub(crate) fn is_claim_to_provision(claim: &PersistentVolumeClaim, identity: &Identity) -> bool {
    claim.metadata.deletion_timestamp.is_none()
        && bound_volume(claim).is_none()
        && provisioner(claim) == Some(identity.driver())
}

/// Returns `true` if the claim has a volume of this driver and still names the node that was selected for it.
pub(crate) fn is_claim_with_selection(claim: &PersistentVolumeClaim, identity: &Identity) -> bool {
    claim.metadata.deletion_timestamp.is_none()
        && bound_volume(claim).is_some()
        && provisioner(claim) == Some(identity.driver())
        && selected_node(claim).is_some()
}

/// Returns the node that was selected for the claim, normally by the scheduler.
pub(crate) fn selected_node(claim: &PersistentVolumeClaim) -> Option<&str> {
    annotation(claim, SELECTED_NODE)
}

/// Returns the merge patch that selects a node for the claim, or removes the selected one.
pub(crate) fn selection_patch(claim: &PersistentVolumeClaim, node: Option<&str>) -> Value {
    json!({"metadata": {
        // Both are preconditions: the API server returns 409 if either differs.
        "uid": claim.metadata.uid,
        "resourceVersion": claim.metadata.resource_version,
        "annotations": {SELECTED_NODE: node},
    }})
}

pub(crate) fn class_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.as_ref()?.storage_class_name.as_deref()
}

/// Returns `true` if the claim could concern this node, now or once its PersistentVolume is known. Other claims are not cached.
///
/// A bound claim without a selected node and a provisioner has a PersistentVolume that a person created. It may be of this node:
/// only the PersistentVolume shows that. A claim that waits for this driver without a selected node may be for any node.
pub(crate) fn is_claim_of_interest(claim: &PersistentVolumeClaim, identity: &Identity) -> bool {
    if provisioner(claim).is_some_and(|provisioner| provisioner != identity.driver()) {
        return false;
    }
    match annotation(claim, SELECTED_NODE) {
        Some(node) => node == identity.node(),
        None => bound_volume(claim).is_some() || provisioner(claim).is_some(),
    }
}

pub(crate) fn provisioner(claim: &PersistentVolumeClaim) -> Option<&str> {
    annotation(claim, STORAGE_PROVISIONER).or_else(|| annotation(claim, STORAGE_PROVISIONER_BETA))
}

fn annotation<'a>(claim: &'a PersistentVolumeClaim, name: &str) -> Option<&'a str> {
    claim.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// Returns the name of the PersistentVolume that the claim is bound to or requests.
pub(crate) fn bound_volume(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.as_ref()?.volume_name.as_deref().filter(|name| !name.is_empty())
}

/// Returns the CSI source of a PersistentVolume of this driver, on whatever node.
pub(crate) fn csi<'a>(
    volume: &'a PersistentVolume,
    identity: &Identity,
) -> Option<&'a CSIPersistentVolumeSource> {
    volume.spec.as_ref()?.csi.as_ref().filter(|csi| csi.driver == identity.driver())
}

fn node_label<'a>(volume: &'a PersistentVolume, identity: &Identity) -> Option<&'a str> {
    let label = volume.metadata.labels.as_ref()?.get(&identity.node_label());
    label.map(String::as_str)
}

/// Returns `true` if the PersistentVolume is one of this driver on this node.
///
/// The node label decides, because a node watches by it. A node affinity that excludes this node overrides the label, because it
/// decides where pods run and therefore where the data is.
pub(crate) fn is_our_volume(volume: &PersistentVolume, identity: &Identity) -> bool {
    let Some(spec) = &volume.spec else { return false };
    let labelled_node = node_label(volume, identity);
    let terms = spec.node_affinity.as_ref().and_then(|affinity| affinity.required.as_ref());
    csi(volume, identity).is_some()
        && labelled_node == Some(identity.node())
        && terms.is_none_or(|required| {
            required.node_selector_terms.iter().all(|term| !contradicts(term, identity))
        })
}

/// Returns `true` if the PersistentVolume is certainly one of this driver on another node, so that a volume of its name on this node
/// is not its data.
pub(crate) fn is_elsewhere(volume: &PersistentVolume, identity: &Identity) -> bool {
    other_node(volume, identity).is_some()
}

/// Returns `true` if the data of the PersistentVolume is certainly on another file system of another node. A disk can be moved, so a
/// PersistentVolume of another node may name this file system.
pub(crate) fn is_data_elsewhere(volume: &PersistentVolume, filesystem: &str, identity: &Identity) -> bool {
    is_elsewhere(volume, identity) && filesystem_uuid(volume, identity).is_some_and(|uuid| uuid != filesystem)
}

/// Returns the node of a PersistentVolume of this driver that is on another node.
pub(crate) fn other_node<'a>(volume: &'a PersistentVolume, identity: &Identity) -> Option<&'a str> {
    node_of(volume, identity).filter(|node| *node != identity.node())
}

/// Returns the node of a PersistentVolume of this driver.
pub(crate) fn node_of<'a>(volume: &'a PersistentVolume, identity: &Identity) -> Option<&'a str> {
    csi(volume, identity).and_then(|_ours| node_label(volume, identity))
}

/// Returns `true` if the PersistentVolume is one of this driver on a node and can be on no other node.
pub(crate) fn is_only_on(volume: &PersistentVolume, node: &str, identity: &Identity) -> bool {
    let Some(spec) = &volume.spec else { return false };
    let labelled_node = node_label(volume, identity);
    let terms = spec.node_affinity.as_ref().and_then(|affinity| affinity.required.as_ref());
    let key = identity.topology_key();
    let only = |term: &NodeSelectorTerm| {
        let mut expressions = term.match_expressions.iter().flatten();
        expressions.any(|expression| {
            expression.key == key
                && expression.operator == "In"
                && expression.values.as_deref().is_some_and(|values| values == [node])
        })
    };
    csi(volume, identity).is_some()
        && labelled_node == Some(node)
        && terms.is_some_and(|required| {
            !required.node_selector_terms.is_empty() && required.node_selector_terms.iter().all(only)
        })
}

/// Returns `true` if the PersistentVolume was created for this claim and not for an earlier one of the same name.
pub(crate) fn is_volume_of(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    reference.is_some_and(|reference| {
        claim.metadata.uid.is_some()
            && reference.uid == claim.metadata.uid
            && reference.namespace == claim.metadata.namespace
            && reference.name == claim.metadata.name
    })
}

/// Returns the claim that a PersistentVolume is bound to. The claim of a released one was deleted.
pub(crate) fn bound_claim(volume: &PersistentVolume) -> Option<ObjectReference> {
    referenced_claim(volume).filter(|_| pv::phase(volume) == Some("Bound"))
}

/// Returns the claim for which a PersistentVolume is or was, whether it still exists or not.
pub(crate) fn referenced_claim(volume: &PersistentVolume) -> Option<ObjectReference> {
    let claim = volume.spec.as_ref()?.claim_ref.as_ref()?;
    let part = |part: &Option<String>| part.clone().filter(|part| !part.is_empty());
    Some(ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        namespace: Some(part(&claim.namespace)?),
        name: Some(part(&claim.name)?),
        // Without a UID, a volume is reserved for a claim and not bound yet.
        uid: Some(part(&claim.uid)?),
        ..ObjectReference::default()
    })
}

/// Returns the id of a claim's volume, which is also the name of its PersistentVolume, in the usual form `pvc-UID`.
///
/// # Errors
/// When the claim has no UID, or one that an API server does not assign.
pub(crate) fn volume_id_for(claim: &PersistentVolumeClaim) -> Result<VolumeId, Refusal> {
    volume_id_of(claim.metadata.uid.as_deref().unwrap_or_default())
}

/// As [`volume_id_for`], for the UID of a claim.
pub(crate) fn volume_id_of(uid: &str) -> Result<VolumeId, Refusal> {
    let refused = || Refusal::Uid(uid.to_owned());
    if uid.is_empty() {
        return Err(refused());
    }
    VolumeId::parse(&format!("pvc-{uid}")).map_err(|_invalid| refused())
}

/// The error of a volume handle that is not a volume id. A person may have created the PersistentVolume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the volume handle is not a volume id: {0}")]
pub(crate) struct InvalidHandle(pub(crate) String);

/// Returns the id in the store of the volume of a PersistentVolume.
///
/// # Errors
/// When the volume handle is not a volume id.
pub(crate) fn volume_id(volume: &PersistentVolume, identity: &Identity) -> Result<VolumeId, InvalidHandle> {
    let handle = csi(volume, identity).map(|csi| csi.volume_handle.as_str()).unwrap_or_default();
    VolumeId::parse(handle).map_err(|error| InvalidHandle(error.to_string()))
}

/// Returns the UUID of the file system that the PersistentVolume names.
pub(crate) fn filesystem_uuid<'a>(volume: &'a PersistentVolume, identity: &Identity) -> Option<&'a str> {
    let attributes = volume.spec.as_ref()?.csi.as_ref()?.volume_attributes.as_ref()?;
    attributes.get(&identity.filesystem_uuid_attribute()).map(String::as_str)
}

/// Returns `true` if a term keeps the volume's pods off this node.
fn contradicts(term: &NodeSelectorTerm, identity: &Identity) -> bool {
    let key = identity.topology_key();
    let mut topology = term.match_expressions.iter().flatten().filter(|expression| expression.key == key);
    topology.any(|expression| {
        let named = expression.values.iter().flatten().any(|node| node == identity.node());
        match expression.operator.as_str() {
            "In" => !named,
            "NotIn" => named,
            "DoesNotExist" => true,
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    #[rstest]
    #[case::ours(json!({}), true)]
    #[case::beta_annotation(json!({"metadata": {"annotations": {STORAGE_PROVISIONER: null, STORAGE_PROVISIONER_BETA: "csi.loopfs.dev"}}}), true)]
    #[case::other_driver(json!({"metadata": {"annotations": {STORAGE_PROVISIONER: "csi.other.dev"}}}), false)]
    #[case::other_driver_beats_beta(json!({"metadata": {"annotations": {STORAGE_PROVISIONER: "csi.other.dev", STORAGE_PROVISIONER_BETA: "csi.loopfs.dev"}}}), false)]
    #[case::no_annotations(json!({"metadata": {"annotations": null}}), false)]
    #[case::bound(json!({"spec": {"volumeName": "pvc-other"}}), false)]
    #[case::empty_volume_name(json!({"spec": {"volumeName": ""}}), true)]
    #[case::being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), false)]
    fn claims_to_provision(#[case] change: Value, #[case] expected: bool) {
        let claim = fixtures::claim(change);
        assert_eq!(is_claim_to_provision(&claim, &fixtures::identity()), expected);
    }

    #[rstest]
    #[case::selected(json!({}), true)]
    #[case::other_node(json!({"metadata": {"annotations": {SELECTED_NODE: "node-b"}}}), false)]
    #[case::other_node_though_bound(json!({"metadata": {"annotations": {SELECTED_NODE: "node-b"}}, "spec": {"volumeName": "v"}}), false)]
    #[case::unbound_and_for_any_node(json!({"metadata": {"annotations": {SELECTED_NODE: null}}}), true)]
    #[case::unbound_and_unselected(json!({"metadata": {"annotations": null}}), false)]
    #[case::of_another_driver(json!({"metadata": {"annotations": {STORAGE_PROVISIONER: "csi.other.dev"}}, "spec": {"volumeName": "v"}}), false)]
    #[case::bound_by_hand(json!({"metadata": {"annotations": null}, "spec": {"volumeName": "v"}}), true)]
    fn claims_of_interest(#[case] change: Value, #[case] expected: bool) {
        assert_eq!(is_claim_of_interest(&fixtures::claim(change), &fixtures::identity()), expected);
    }

    #[rstest]
    #[case::ours(json!({}), true)]
    #[case::no_affinity(json!({"spec": {"nodeAffinity": null}}), true)]
    #[case::no_terms(json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": []}}}}), true)]
    #[case::empty_term(json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{}]}}}}), true)]
    #[case::no_label(json!({"metadata": {"labels": null}}), false)]
    #[case::other_node(json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}), false)]
    #[case::other_driver(json!({"spec": {"csi": {"driver": "csi.other.dev"}}}), false)]
    #[case::not_csi(json!({"spec": {"csi": null, "hostPath": {"path": "/"}}}), false)]
    #[case::no_spec(json!({"spec": null}), false)]
    fn volumes(#[case] change: Value, #[case] expected: bool) {
        assert_eq!(is_our_volume(&fixtures::volume(change), &fixtures::identity()), expected);
    }

    #[rstest]
    #[case::here(json!({}), false)]
    #[case::other_node(json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}), true)]
    #[case::no_label(json!({"metadata": {"labels": null}}), false)]
    #[case::other_driver(json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}, "spec": {"csi": {"driver": "csi.other.dev"}}}), false)]
    fn volumes_elsewhere(#[case] change: Value, #[case] expected: bool) {
        assert_eq!(is_elsewhere(&fixtures::volume(change), &fixtures::identity()), expected);
    }

    #[rstest]
    #[case::there(json!({}), true)]
    #[case::no_affinity(json!({"spec": {"nodeAffinity": null}}), false)]
    #[case::no_terms(json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": []}}}}), false)]
    #[case::empty_term(json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{}]}}}}), false)]
    #[case::two_nodes(json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "topology.csi.loopfs.dev/node", "operator": "In", "values": ["node-a", "node-b"]}]}]}}}}), false)]
    #[case::not_that_node(json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "topology.csi.loopfs.dev/node", "operator": "NotIn", "values": ["node-a"]}]}]}}}}), false)]
    #[case::no_label(json!({"metadata": {"labels": null}}), false)]
    #[case::other_label(json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}), false)]
    #[case::other_driver(json!({"spec": {"csi": {"driver": "csi.other.dev"}}}), false)]
    #[case::no_spec(json!({"spec": null}), false)]
    fn volumes_of_one_node_only(#[case] change: Value, #[case] expected: bool) {
        assert_eq!(is_only_on(&fixtures::volume(change), "node-a", &fixtures::identity()), expected);
    }

    #[rstest]
    #[case::elsewhere("topology.csi.loopfs.dev/node", "In", &["node-b"], false)]
    #[case::here_or_elsewhere("topology.csi.loopfs.dev/node", "In", &["node-b", "node-a"], true)]
    #[case::not_here("topology.csi.loopfs.dev/node", "NotIn", &["node-a"], false)]
    #[case::nowhere("topology.csi.loopfs.dev/node", "DoesNotExist", &[], false)]
    #[case::anywhere("topology.csi.loopfs.dev/node", "Exists", &[], true)]
    #[case::in_nothing("topology.csi.loopfs.dev/node", "In", &[], false)]
    #[case::some_other_key("zone", "In", &["b"], true)]
    #[case::nonsense_operator("topology.csi.loopfs.dev/node", "?", &["node-b"], true)]
    fn excluding_node_affinity_overrides_label(
        #[case] key: &str,
        #[case] operator: &str,
        #[case] values: &[&str],
        #[case] expected: bool,
    ) {
        let terms = json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]);
        let change = json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}});
        assert_eq!(is_our_volume(&fixtures::volume(change), &fixtures::identity()), expected);
    }

    #[rstest]
    #[case::same(json!({}), true)]
    #[case::other_uid(json!({"spec": {"claimRef": {"uid": "someone-else"}}}), false)]
    #[case::no_uid(json!({"spec": {"claimRef": {"uid": null}}}), false)]
    #[case::unclaimed(json!({"spec": {"claimRef": null}}), false)]
    fn volumes_of_a_claim(#[case] change: Value, #[case] expected: bool) {
        assert_eq!(is_volume_of(&fixtures::volume(change), &fixtures::claim(json!({}))), expected);
    }
}
