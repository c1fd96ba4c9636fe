//! The part of a claim's status that a resize writes: its values, and patches to it.
//!
//! Three processes write it: this one, the kubelet and kube-controller-manager. Each patch therefore has the resource version
//! from which it was computed as a precondition. If the claim changed in the meantime, the API server returns a conflict.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use loopfs::Bytes;
use serde_json::{Map, Value, json};

use crate::objects::quantity;

/// The name of the resource in a claim's requests and status.
pub(crate) const STORAGE: &str = "storage";

/// The annotation of a resize that is complete without the node. The kubelet then does not change the claim.
pub(crate) const NODE_EXPANSION_NOT_REQUIRED: &str = "volume.kubernetes.io/node-expansion-not-required";

/// The state of a resize: `status.allocatedResourceStatuses["storage"]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ResizeStatus {
    /// The provisioner is expanding the volume.
    ControllerInProgress,
    /// The requested size is not available; the user may request less.
    ControllerInfeasible,
    /// The kubelet has to expand the volume on the node.
    NodePending,
    /// The kubelet is expanding the volume on the node.
    NodeInProgress,
    /// The driver returned to the kubelet that the volume cannot be expanded on the node.
    NodeInfeasible,
}

impl ResizeStatus {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ResizeStatus::ControllerInProgress => "ControllerResizeInProgress",
            ResizeStatus::ControllerInfeasible => "ControllerResizeInfeasible",
            ResizeStatus::NodePending => "NodeResizePending",
            ResizeStatus::NodeInProgress => "NodeResizeInProgress",
            ResizeStatus::NodeInfeasible => "NodeResizeInfeasible",
        }
    }

    /// Returns the claim's state, or `None` if no resize is in progress. An unknown state of a future version counts as `None`:
    /// to expand the volume again is harmless, to wait for an unknown step is not.
    pub(crate) fn of(claim: &PersistentVolumeClaim) -> Option<Self> {
        let value = claim.status.as_ref()?.allocated_resource_statuses.as_ref()?.get(STORAGE)?;
        let known = [
            ResizeStatus::ControllerInProgress,
            ResizeStatus::ControllerInfeasible,
            ResizeStatus::NodePending,
            ResizeStatus::NodeInProgress,
            ResizeStatus::NodeInfeasible,
        ];
        known.into_iter().find(|status| status.as_str() == value)
    }
}

/// The four condition types that belong to resizing. Other conditions of the claim are never changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ResizeCondition {
    Resizing,
    FileSystemResizePending,
    ControllerResizeError,
    NodeResizeError,
}

impl ResizeCondition {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ResizeCondition::Resizing => "Resizing",
            ResizeCondition::FileSystemResizePending => "FileSystemResizePending",
            ResizeCondition::ControllerResizeError => "ControllerResizeError",
            ResizeCondition::NodeResizeError => "NodeResizeError",
        }
    }

    fn owns(type_: &str) -> bool {
        let all = [
            ResizeCondition::Resizing,
            ResizeCondition::FileSystemResizePending,
            ResizeCondition::ControllerResizeError,
            ResizeCondition::NodeResizeError,
        ];
        all.into_iter().any(|condition| condition.as_str() == type_)
    }
}

/// The treatment of resize conditions that a claim already has and a patch does not mention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Earlier {
    Keep,
    Drop,
}

/// Merges one resize condition (or none) into the ones a claim has.
///
/// Conditions of other types keep their position. A condition with the same content stays unchanged, including its transition
/// time, so that repeating a failure is not a change.
pub(crate) fn merge_conditions(
    existing: &[PersistentVolumeClaimCondition],
    new: Option<(ResizeCondition, String)>,
    earlier: Earlier,
    now: Timestamp,
) -> Vec<PersistentVolumeClaimCondition> {
    let mut new = new.map(|(type_, message)| PersistentVolumeClaimCondition {
        type_: type_.as_str().to_owned(),
        status: "True".to_owned(),
        message: (!message.is_empty()).then_some(message),
        last_transition_time: Some(Time(now)),
        ..Default::default()
    });
    let mentioned = new.as_ref().map(|new| new.type_.clone());
    let mut merged = Vec::with_capacity(existing.len() + 1);
    for condition in existing {
        if !ResizeCondition::owns(&condition.type_) {
            merged.push(condition.clone());
        } else if mentioned.as_ref() == Some(&condition.type_) {
            // `take` also drops duplicates of the type, which only a claim edited by a person has.
            merged.extend(
                new.take().map(|new| if has_same_content(&new, condition) { condition.clone() } else { new }),
            );
        } else if earlier == Earlier::Keep {
            merged.push(condition.clone());
        }
    }
    merged.extend(new);
    merged
}

fn has_same_content(new: &PersistentVolumeClaimCondition, old: &PersistentVolumeClaimCondition) -> bool {
    (&new.status, &new.message) == (&old.status, &old.message)
}

/// Returns the size that a claim requests.
///
/// # Errors
/// When the quantity is malformed; `Ok(None)` when there is none.
pub(crate) fn requested(claim: &PersistentVolumeClaim) -> Result<Option<Bytes>, quantity::QuantityError> {
    let requests = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    requests.and_then(|requests| requests.get(STORAGE)).map(quantity::parse).transpose()
}

/// Returns the size that a bound claim requests, if that is more than it has. The request was validated when the claim was bound; a
/// malformed one requests nothing that could be provided.
pub(crate) fn requested_expansion(claim: &PersistentVolumeClaim) -> Option<Bytes> {
    let capacity = claim.status.as_ref().and_then(|status| status.capacity.as_ref());
    let has = recorded(capacity).unwrap_or_default();
    requested(claim).ok().flatten().filter(|target| *target > has)
}

/// Returns a recorded size. A malformed one counts as absent.
pub(crate) fn recorded(resources: Option<&std::collections::BTreeMap<String, Quantity>>) -> Option<Bytes> {
    quantity::parse(resources?.get(STORAGE)?).ok()
}

/// A merge patch for a claim's status, which contains only the fields that differ.
#[derive(Debug)]
pub(crate) struct StatusPatch<'a> {
    claim: &'a PersistentVolumeClaim,
    status: Map<String, Value>,
    annotations: Map<String, Value>,
}

impl<'a> StatusPatch<'a> {
    pub(crate) fn of(claim: &'a PersistentVolumeClaim) -> Self {
        StatusPatch { claim, status: Map::new(), annotations: Map::new() }
    }

    pub(crate) fn capacity(mut self, size: Bytes) -> Self {
        let status = self.claim.status.as_ref();
        if recorded(status.and_then(|status| status.capacity.as_ref())) != Some(size) {
            self.status.insert("capacity".to_owned(), json!({ STORAGE: quantity::format(size) }));
        }
        self
    }

    pub(crate) fn allocated(mut self, size: Bytes) -> Self {
        let status = self.claim.status.as_ref();
        if recorded(status.and_then(|status| status.allocated_resources.as_ref())) != Some(size) {
            self.status.insert("allocatedResources".to_owned(), json!({ STORAGE: quantity::format(size) }));
        }
        self
    }

    pub(crate) fn resize_status(mut self, to: Option<ResizeStatus>) -> Self {
        let statuses =
            self.claim.status.as_ref().and_then(|status| status.allocated_resource_statuses.as_ref());
        let now = statuses.and_then(|statuses| statuses.get(STORAGE)).map(String::as_str);
        let to = to.map(ResizeStatus::as_str);
        if now != to {
            self.status.insert("allocatedResourceStatuses".to_owned(), json!({ STORAGE: to }));
        }
        self
    }

    pub(crate) fn condition(
        mut self,
        new: Option<(ResizeCondition, String)>,
        earlier: Earlier,
        now: Timestamp,
    ) -> Self {
        let existing =
            self.claim.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let merged = merge_conditions(existing, new, earlier, now);
        if merged != existing {
            self.status.insert("conditions".to_owned(), json!(merged));
        }
        self
    }

    /// Sets or removes [`NODE_EXPANSION_NOT_REQUIRED`]; the API server takes annotations with the status.
    pub(crate) fn node_expansion_not_required(mut self, to: bool) -> Self {
        let annotations = self.claim.metadata.annotations.as_ref();
        let now =
            annotations.is_some_and(|annotations| annotations.contains_key(NODE_EXPANSION_NOT_REQUIRED));
        if now != to {
            let value = if to { json!("true") } else { Value::Null };
            self.annotations.insert(NODE_EXPANSION_NOT_REQUIRED.to_owned(), value);
        }
        self
    }

    /// Returns the patch, or `None` if the claim has all values already.
    pub(crate) fn build(self) -> Option<Value> {
        if self.status.is_empty() && self.annotations.is_empty() {
            return None;
        }
        let mut metadata = Map::new();
        // Both are preconditions: the API server returns 409 if either differs.
        metadata.insert("uid".to_owned(), json!(self.claim.metadata.uid));
        metadata.insert("resourceVersion".to_owned(), json!(self.claim.metadata.resource_version));
        if !self.annotations.is_empty() {
            metadata.insert("annotations".to_owned(), Value::Object(self.annotations));
        }
        let mut patch = json!({ "metadata": metadata });
        if !self.status.is_empty() {
            patch["status"] = Value::Object(self.status);
        }
        Some(patch)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn condition(type_: &str, message: &str) -> PersistentVolumeClaimCondition {
        PersistentVolumeClaimCondition {
            type_: type_.to_owned(),
            status: "True".to_owned(),
            message: (!message.is_empty()).then(|| message.to_owned()),
            last_transition_time: Some(Time(Timestamp::MAX)),
            ..Default::default()
        }
    }

    fn types(conditions: &[PersistentVolumeClaimCondition]) -> Vec<&str> {
        conditions.iter().map(|condition| condition.type_.as_str()).collect()
    }

    #[rstest]
    #[case::foreign_stay(&["Foreign"], None, Earlier::Drop, &["Foreign"])]
    #[case::ours_dropped(&["Resizing", "Foreign", "NodeResizeError"], None, Earlier::Drop, &["Foreign"])]
    #[case::ours_kept(&["Resizing"], Some(ResizeCondition::ControllerResizeError), Earlier::Keep, &["Resizing", "ControllerResizeError"])]
    #[case::replaced_in_place(&["Resizing", "Foreign"], Some(ResizeCondition::Resizing), Earlier::Drop, &["Resizing", "Foreign"])]
    #[case::others_of_ours_go(&["NodeResizeError"], Some(ResizeCondition::Resizing), Earlier::Drop, &["Resizing"])]
    #[case::duplicates_collapse(&["Resizing", "Resizing"], Some(ResizeCondition::Resizing), Earlier::Keep, &["Resizing"])]
    fn conditions_are_merged(
        #[case] existing: &[&str],
        #[case] new: Option<ResizeCondition>,
        #[case] earlier: Earlier,
        #[case] expected: &[&str],
    ) {
        let existing: Vec<_> = existing.iter().map(|type_| condition(type_, "")).collect();
        let merged = merge_conditions(&existing, new.map(|type_| (type_, "m".to_owned())), earlier, NOW);
        assert_eq!(types(&merged), expected);
    }

    #[test]
    fn unchanged_condition_keeps_transition_time() {
        let existing = [condition("ControllerResizeError", "no space")];
        let new = |message: &str| Some((ResizeCondition::ControllerResizeError, message.to_owned()));
        assert_eq!(merge_conditions(&existing, new("no space"), Earlier::Keep, NOW), existing);
        let changed = merge_conditions(&existing, new("still no space"), Earlier::Keep, NOW);
        assert_eq!(changed[0].last_transition_time, Some(Time(NOW)));
    }

    #[test]
    fn patch_has_differences_and_preconditions() {
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": { "uid": "u", "resourceVersion": "7", "annotations": { NODE_EXPANSION_NOT_REQUIRED: "true" } },
            "status": { "capacity": { "storage": "1Mi" }, "allocatedResources": { "storage": "1048576" } },
        }))
        .unwrap();
        let patch = StatusPatch::of(&claim)
            .capacity(Bytes(1 << 20))
            .allocated(Bytes(4 << 20))
            .resize_status(Some(ResizeStatus::ControllerInProgress))
            .condition(None, Earlier::Drop, NOW)
            .node_expansion_not_required(false)
            .build();
        assert_eq!(
            patch,
            Some(json!({
                "metadata": {
                    "uid": "u", "resourceVersion": "7", "annotations": { NODE_EXPANSION_NOT_REQUIRED: null },
                },
                "status": {
                    "allocatedResources": { "storage": "4Mi" },
                    "allocatedResourceStatuses": { "storage": "ControllerResizeInProgress" },
                },
            }))
        );
    }

    #[test]
    fn an_unchanged_status_needs_no_patch() {
        let claim = PersistentVolumeClaim::default();
        let patch = StatusPatch::of(&claim).resize_status(None).condition(None, Earlier::Drop, NOW);
        assert_eq!(patch.node_expansion_not_required(false).build(), None);
    }
}
