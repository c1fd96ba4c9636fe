//! The labels with which claims name their node, and the record that all claims have them. Pure.

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use serde_json::{Value, json};

use crate::objects::{
    identity::{Identity, is_label_value},
    ownership,
};

/// The key in the ConfigMap: the UID of the MutatingAdmissionPolicyBinding with which the API server labels all claims.
pub(crate) const BINDING_UID: &str = "policy-binding-uid";

/// The ConfigMap with the record. The MutatingAdmissionPolicy and its binding have the same name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// Returns `true` if each claim for which a node was selected has the label, and if the API server labels all others.
pub(crate) fn are_complete(config_map: &ConfigMap) -> bool {
    // The garbage collector deletes it after the policy was deleted.
    config_map.metadata.deletion_timestamp.is_none() && recorded_binding(config_map).is_some()
}

/// Returns the UID of the binding in the record.
pub(crate) fn recorded_binding(config_map: &ConfigMap) -> Option<&str> {
    let uid = config_map.data.as_ref()?.get(BINDING_UID)?;
    Some(uid.as_str()).filter(|uid| !uid.is_empty())
}

/// The label that a claim lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MissingLabel {
    /// It must name this node.
    Node(String),
    /// It must name the node of this PersistentVolume, if that is one of the driver.
    NodeOfVolume(String),
}

/// Returns the label that a claim lacks. Returns `None` if its label is right, and if it needs none: it belongs to another driver, or no
/// node was selected.
pub(crate) fn missing_label(claim: &PersistentVolumeClaim, identity: &Identity) -> Option<MissingLabel> {
    let is_ours = ownership::provisioner(claim).map(|provisioner| provisioner == identity.driver());
    let label = claim.metadata.labels.as_ref().and_then(|labels| labels.get(&identity.node_label()));
    match (ownership::selected_node(claim), is_ours) {
        (_, Some(false)) => None,
        // A node with another name does not exist, and the API server would refuse the label.
        (Some(node), Some(true)) if is_label_value(node) => {
            (label.map(String::as_str) != Some(node)).then(|| MissingLabel::Node(node.to_owned()))
        }
        // A person has bound it, or a version without the controller has provisioned it.
        (None, _) if label.is_none() => {
            ownership::bound_volume(claim).map(|volume| MissingLabel::NodeOfVolume(volume.to_owned()))
        }
        _ => None,
    }
}

/// Returns the merge patch that labels a claim.
pub(crate) fn label_patch(claim: &PersistentVolumeClaim, node: &str, identity: &Identity) -> Value {
    json!({"metadata": {
        // Both are preconditions: the API server returns 409 if either differs.
        "uid": claim.metadata.uid,
        "resourceVersion": claim.metadata.resource_version,
        "labels": {identity.node_label(): node},
    }})
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::testing::fixtures;

    const LABEL: &str = "csi.loopfs.dev/node";
    const PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";

    fn node(name: &str) -> Option<MissingLabel> {
        Some(MissingLabel::Node(name.to_owned()))
    }

    fn volume(name: &str) -> Option<MissingLabel> {
        Some(MissingLabel::NodeOfVolume(name.to_owned()))
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
        json!({"metadata": {"annotations": null, "labels": {LABEL: "node-b"}}, "spec": {"volumeName": "v"}}), None
    )]
    fn labels_that_claims_lack(#[case] change: Value, #[case] expected: Option<MissingLabel>) {
        assert_eq!(missing_label(&fixtures::claim(change), &fixtures::identity()), expected);
    }

    #[rstest]
    #[case::recorded(json!({"data": {BINDING_UID: "u"}}), true)]
    #[case::not_recorded(json!({"data": {}}), false)]
    #[case::no_data(json!({}), false)]
    #[case::empty(json!({"data": {BINDING_UID: ""}}), false)]
    #[case::being_deleted(json!({"data": {BINDING_UID: "u"}, "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), false)]
    fn the_record_is_trusted_while_it_names_the_policy(#[case] config_map: Value, #[case] expected: bool) {
        let config_map: ConfigMap = serde_json::from_value(config_map).unwrap();
        assert_eq!(are_complete(&config_map), expected);
    }
}
