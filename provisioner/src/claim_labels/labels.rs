//! The labels with which claims name their node, and the record that all claims have them. Pure.

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use serde_json::{Value, json};

use crate::objects::identity::{Identity, is_label_value};
use crate::objects::ownership;

/// The key in the ConfigMap: the UID of the MutatingAdmissionPolicyBinding with which the API server labels all claims.
pub(crate) const BINDING_UID: &str = "policy-binding-uid";

/// The ConfigMap with the record. The MutatingAdmissionPolicy and its binding have the same name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LabelRecordSource {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl LabelRecordSource {
    /// Returns `None` without the component. The namespace of a process without a pod is unknown.
    pub(crate) fn new(namespace: Option<&str>, name: Option<&str>) -> Option<Self> {
        let (namespace, name) = namespace.zip(name.filter(|name| !name.is_empty()))?;
        Some(LabelRecordSource { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

/// Returns `true` if each claim for which a node was selected has the label, and if the API server labels all others.
pub(crate) fn are_complete(config_map: &ConfigMap) -> bool {
    // The garbage collector deletes it after the policy was deleted.
    config_map.metadata.deletion_timestamp.is_none() && recorded_binding(config_map).is_some()
}

/// Returns the UID of the binding in the record. Returns `None` if the binding does not own the ConfigMap: the garbage collector would
/// leave the record when the binding is deleted.
pub(crate) fn recorded_binding(config_map: &ConfigMap) -> Option<&str> {
    let uid = written_binding(config_map).filter(|uid| !uid.is_empty())?;
    let owners = config_map.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().any(|owner| owner.uid == uid).then_some(uid)
}

/// Returns what the ConfigMap has in the place of the record, whether it is one or not.
pub(crate) fn written_binding(config_map: &ConfigMap) -> Option<&str> {
    Some(config_map.data.as_ref()?.get(BINDING_UID)?.as_str())
}

/// The label that a claim must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RequiredLabel {
    /// It must name this node, and does not.
    Node(String),
    /// It must name the node of this PersistentVolume, if that is one of the driver. The claim does not show whether it does.
    NodeOfVolume(String),
}

/// Returns the label that a claim must have. Returns `None` if it has that label, and if it needs none: it belongs to another driver, or
/// no node was selected.
pub(crate) fn required_label(claim: &PersistentVolumeClaim, identity: &Identity) -> Option<RequiredLabel> {
    let is_ours = ownership::provisioner(claim).map(|provisioner| provisioner == identity.driver());
    match (ownership::selected_node(claim), is_ours) {
        (_, Some(false)) => None,
        // A node with another name does not exist, and the API server would refuse the label.
        (Some(node), Some(true)) if is_label_value(node) => {
            (label_of(claim, identity) != Some(node)).then(|| RequiredLabel::Node(node.to_owned()))
        }
        // A person has bound it, or a version without the controller has provisioned it.
        (None, _) => {
            ownership::bound_volume(claim).map(|volume| RequiredLabel::NodeOfVolume(volume.to_owned()))
        }
        _ => None,
    }
}

pub(crate) fn label_of<'a>(claim: &'a PersistentVolumeClaim, identity: &Identity) -> Option<&'a str> {
    claim.metadata.labels.as_ref()?.get(&identity.node_label()).map(String::as_str)
}

/// Returns the merge patch that labels a claim with the selected node. The API server returns 409 if the claim has changed.
pub(crate) fn label_patch(claim: &PersistentVolumeClaim, node: &str, identity: &Identity) -> Value {
    let mut patch = bound_label_patch(claim, node, identity);
    patch["metadata"]["resourceVersion"] = json!(claim.metadata.resource_version);
    patch
}

/// Returns the merge patch that labels a claim with the node of its PersistentVolume. A claim never gets another PersistentVolume, so other
/// changes of the claim in the meantime do not matter. If they did, frequent changes could keep it from getting the label.
pub(crate) fn bound_label_patch(claim: &PersistentVolumeClaim, node: &str, identity: &Identity) -> Value {
    json!({"metadata": {"uid": claim.metadata.uid, "labels": {identity.node_label(): node}}})
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::testing::fixtures;

    const LABEL: &str = "csi.loopfs.dev/node";
    const PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";

    fn node(name: &str) -> Option<RequiredLabel> {
        Some(RequiredLabel::Node(name.to_owned()))
    }

    fn volume(name: &str) -> Option<RequiredLabel> {
        Some(RequiredLabel::NodeOfVolume(name.to_owned()))
    }

    #[rstest]
    #[case::selected(json!({}), node("node-a"))]
    #[case::labelled(json!({"metadata": {"labels": {LABEL: "node-a"}}}), None)]
    #[case::labelled_with_an_earlier_node(json!({"metadata": {"labels": {LABEL: "node-b"}}}), node("node-a"))]
    #[case::selected_and_bound(json!({"spec": {"volumeName": "v"}}), node("node-a"))]
    #[case::of_another_driver(json!({"metadata": {"annotations": {PROVISIONER: "csi.other.dev"}}}), None)]
    #[case::bound_and_of_another_driver(
        json!({"metadata": {"annotations": {PROVISIONER: "csi.other.dev", ownership::SELECTED_NODE: null}}, "spec": {"volumeName": "v"}}),
        None
    )]
    #[case::of_no_driver_yet(json!({"metadata": {"annotations": {PROVISIONER: null}}}), None)]
    #[case::not_selected(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: null}}}), None)]
    #[case::a_name_that_no_node_has(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: "a,b"}}}), None)]
    #[case::bound_by_hand(json!({"metadata": {"annotations": null}, "spec": {"volumeName": "v"}}), volume("v"))]
    #[case::bound_without_a_selected_node(
        json!({"metadata": {"annotations": {ownership::SELECTED_NODE: null}}, "spec": {"volumeName": "v"}}), volume("v")
    )]
    #[case::bound_by_hand_and_labelled(
        json!({"metadata": {"annotations": null, "labels": {LABEL: "node-b"}}, "spec": {"volumeName": "v"}}), volume("v")
    )]
    fn labels_that_claims_require(#[case] change: Value, #[case] expected: Option<RequiredLabel>) {
        assert_eq!(required_label(&fixtures::claim(change), &fixtures::identity()), expected);
    }

    #[rstest]
    #[case::recorded(json!({}), true)]
    #[case::not_recorded(json!({"data": {BINDING_UID: null}}), false)]
    #[case::no_data(json!({"data": null}), false)]
    #[case::empty(json!({"data": {BINDING_UID: ""}}), false)]
    #[case::being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), false)]
    #[case::of_no_owner(json!({"metadata": {"ownerReferences": null}}), false)]
    #[case::of_another_owner(json!({"data": {BINDING_UID: "earlier"}}), false)]
    fn record_is_trusted_while_policy_owned(#[case] change: Value, #[case] expected: bool) {
        let owner = json!({"apiVersion": "v1", "kind": "MutatingAdmissionPolicyBinding", "name": "labels", "uid": "u"});
        let mut config_map = json!({"metadata": {"ownerReferences": [owner]}, "data": {BINDING_UID: "u"}});
        fixtures::merge(&mut config_map, change);
        let config_map: ConfigMap = serde_json::from_value(config_map).unwrap();
        assert_eq!(are_complete(&config_map), expected);
    }
}
