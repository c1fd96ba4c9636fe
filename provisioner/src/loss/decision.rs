//! Decides what to do about one volume of a deleted node or a lost disk. Pure.
//!
//! The node or the disk can come back after each step, and its provisioner then deletes the data of a released PersistentVolume that
//! has the driver's finalizer. The finalizer is therefore removed before the claim is deleted: from then on, no provisioner deletes the
//! data for the deletion of this claim.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;

use crate::objects::identity::Identity;
use crate::objects::loss_policy::{OnNodeLoss, Policy};
use crate::objects::{ownership, pv};

/// The state that a decision is based on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeLossState<'a> {
    pub(crate) volume: &'a PersistentVolume,
    /// The deleted node, or the node that lost its disk.
    pub(crate) node: &'a str,
    /// The claim that currently has the name which the volume's `claimRef` gives.
    pub(crate) claim: Option<&'a PersistentVolumeClaim>,
    /// For how long this process has seen that this volume is lost, without interruption.
    pub(crate) lost_for: Duration,
}

/// The action for a PersistentVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Nothing, until the object changes.
    Ignore,
    /// Nothing before this time has passed.
    Wait(Duration),
    /// Check again later: another deletion is in progress and ends without this process.
    Requeue,
    /// Record an event that says that the PersistentVolume is kept.
    ReportOnly,
    /// Delete the PersistentVolume. Kubernetes keeps it while it has finalizers: its own until the claim is deleted, and the driver's.
    DeletePv,
    /// Remove the driver's finalizer. No provisioner deletes the data any more.
    RemoveFinalizer,
    /// Delete the claim.
    DeleteClaim,
}

/// Decides about one PersistentVolume.
pub(crate) fn decide(state: NodeLossState<'_>, identity: &Identity) -> Decision {
    let NodeLossState { volume, node, claim, lost_for } = state;
    if !ownership::is_only_on(volume, node, identity) {
        return Decision::Ignore;
    }
    let policy = Policy::of(volume, identity);
    if lost_for < policy.grace {
        return Decision::Wait(policy.grace - lost_for);
    }
    if policy.on_node_loss == OnNodeLoss::Retain {
        return Decision::ReportOnly;
    }
    // A newer claim of the same name does not belong to this volume.
    let claim = claim.filter(|claim| {
        ownership::is_volume_of(volume, claim)
            && ownership::bound_volume(claim).is_none_or(|name| name == volume.name_any())
    });
    if claim.is_some_and(|claim| claim.metadata.deletion_timestamp.is_some()) {
        return Decision::Requeue;
    }
    let deletes_claim = policy.on_node_loss == OnNodeLoss::DeleteClaim && claim.is_some();
    // The PersistentVolume is the only record of where the data is, and its reclaim policy retains the data.
    if !pv::has_delete_policy(volume) {
        return if deletes_claim { Decision::DeleteClaim } else { Decision::ReportOnly };
    }
    // The provisioner discards an available PersistentVolume that is marked for deletion, with its data.
    let settled = if claim.is_some() { "Bound" } else { "Released" };
    if pv::phase(volume) != Some(settled) {
        return Decision::Requeue;
    }
    if volume.metadata.deletion_timestamp.is_none() {
        return Decision::DeletePv;
    }
    // With `deleteVolume`, a user decides whether the claim is deleted, and with it the data if the node is back by then.
    let keeps_claim = claim.is_some() && !deletes_claim;
    if pv::has_finalizer(volume) && !keeps_claim {
        return Decision::RemoveFinalizer;
    }
    if deletes_claim { Decision::DeleteClaim } else { Decision::Requeue }
}

/// Returns `true` if an object of this volume will be deleted, once its grace time is over.
pub(crate) fn will_delete(volume: &PersistentVolume, node: &str, identity: &Identity) -> bool {
    ownership::is_only_on(volume, node, identity)
        && match Policy::of(volume, identity).on_node_loss {
            OnNodeLoss::Retain => false,
            OnNodeLoss::DeleteVolume => pv::has_delete_policy(volume),
            OnNodeLoss::DeleteClaim => pv::has_delete_policy(volume) || pv::phase(volume) == Some("Bound"),
        }
}

/// Returns `true` if an object of this volume will be deleted, and none was before.
pub(crate) fn begins_deletion(volume: &PersistentVolume, node: &str, identity: &Identity) -> bool {
    volume.metadata.deletion_timestamp.is_none() && will_delete(volume, node, identity)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    const NODE: &str = "node-a";
    const DELETION_TIME: &str = "2026-01-01T00:00:00Z";

    /// Returns a PersistentVolume with a policy and a change.
    fn volume(policy: &str, change: Value) -> PersistentVolume {
        let mut whole = json!({"metadata": {"annotations": {
            "csi.loopfs.dev/on-node-loss": policy, "csi.loopfs.dev/node-loss-grace-seconds": "60",
        }}});
        fixtures::merge_keeping_nulls(&mut whole, change);
        fixtures::volume(whole)
    }

    fn decided(volume: &PersistentVolume, claim: Option<Value>, lost_for: u64) -> Decision {
        let claim = claim.map(fixtures::bound_claim);
        let state = NodeLossState {
            volume,
            node: NODE,
            claim: claim.as_ref(),
            lost_for: Duration::from_secs(lost_for),
        };
        decide(state, &fixtures::identity())
    }

    fn bound() -> Option<Value> {
        Some(json!({}))
    }

    fn claim_in_deletion() -> Option<Value> {
        Some(json!({"metadata": {"deletionTimestamp": DELETION_TIME}}))
    }

    fn newer_claim() -> Option<Value> {
        Some(json!({"metadata": {"uid": "another"}}))
    }

    #[rstest]
    #[case::retain("retain", json!({}), bound(), Decision::ReportOnly)]
    #[case::retain_released("retain", json!({"status": {"phase": "Released"}}), None, Decision::ReportOnly)]
    #[case::retain_marked("retain", json!({"status": {"phase": "Released"}, "metadata": {"deletionTimestamp": DELETION_TIME}}), None, Decision::ReportOnly)]
    #[case::nonsense("delete", json!({}), bound(), Decision::ReportOnly)]
    #[case::volume_bound("deleteVolume", json!({}), bound(), Decision::DeletePv)]
    #[case::volume_marked("deleteVolume", json!({"metadata": {"deletionTimestamp": DELETION_TIME}}), bound(), Decision::Requeue)]
    #[case::volume_of_a_claim_in_deletion("deleteVolume", json!({}), claim_in_deletion(), Decision::Requeue)]
    #[case::volume_released("deleteVolume", json!({"status": {"phase": "Released"}}), None, Decision::DeletePv)]
    #[case::volume_released_and_marked("deleteVolume", json!({"status": {"phase": "Released"}, "metadata": {"deletionTimestamp": DELETION_TIME}}), None, Decision::RemoveFinalizer)]
    #[case::volume_not_released_yet("deleteVolume", json!({}), None, Decision::Requeue)]
    #[case::volume_no_status("deleteVolume", json!({"status": null}), None, Decision::Requeue)]
    #[case::volume_without_our_finalizer("deleteVolume", json!({"status": {"phase": "Released"}, "metadata": {"deletionTimestamp": DELETION_TIME, "finalizers": ["other"]}}), None, Decision::Requeue)]
    #[case::volume_retained("deleteVolume", json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}), bound(), Decision::ReportOnly)]
    #[case::volume_retained_and_released("deleteVolume", json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), None, Decision::ReportOnly)]
    #[case::claim_bound("deleteClaim", json!({}), bound(), Decision::DeletePv)]
    #[case::claim_bound_and_marked("deleteClaim", json!({"metadata": {"deletionTimestamp": DELETION_TIME}}), bound(), Decision::RemoveFinalizer)]
    #[case::claim_bound_without_our_finalizer("deleteClaim", json!({"metadata": {"deletionTimestamp": DELETION_TIME, "finalizers": ["kubernetes.io/pv-protection"]}}), bound(), Decision::DeleteClaim)]
    #[case::claim_in_deletion("deleteClaim", json!({}), claim_in_deletion(), Decision::Requeue)]
    #[case::claim_not_bound_yet("deleteClaim", json!({"status": {"phase": "Available"}}), Some(json!({"spec": {"volumeName": null}})), Decision::Requeue)]
    #[case::claim_deleted("deleteClaim", json!({}), None, Decision::Requeue)]
    #[case::claim_deleted_and_released("deleteClaim", json!({"status": {"phase": "Released"}}), None, Decision::DeletePv)]
    #[case::newer_claim("deleteClaim", json!({"status": {"phase": "Released"}}), newer_claim(), Decision::DeletePv)]
    #[case::newer_claim_before_release("deleteClaim", json!({}), newer_claim(), Decision::Requeue)]
    #[case::claim_of_another_volume("deleteClaim", json!({}), Some(json!({"spec": {"volumeName": "pvc-other"}})), Decision::Requeue)]
    #[case::claim_of_a_retained_volume("deleteClaim", json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}), bound(), Decision::DeleteClaim)]
    #[case::retained_and_its_claim_deleted("deleteClaim", json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), None, Decision::ReportOnly)]
    #[case::without_claim("deleteClaim", json!({"spec": {"claimRef": null}, "status": {"phase": "Available"}}), None, Decision::Requeue)]
    #[case::of_another_node("deleteClaim", json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}), bound(), Decision::Ignore)]
    #[case::of_another_driver("deleteClaim", json!({"spec": {"csi": {"driver": "csi.other.dev"}}}), bound(), Decision::Ignore)]
    #[case::on_any_node("deleteClaim", json!({"spec": {"nodeAffinity": null}}), bound(), Decision::Ignore)]
    fn decides(
        #[case] policy: &str,
        #[case] change: Value,
        #[case] claim: Option<Value>,
        #[case] expected: Decision,
    ) {
        let volume = volume(policy, change);
        assert_eq!(decided(&volume, claim.clone(), 60), expected);
        // Before the grace time has passed, every decision but Ignore is to wait.
        let before =
            if expected == Decision::Ignore { expected } else { Decision::Wait(Duration::from_secs(1)) };
        assert_eq!(decided(&volume, claim, 59), before);
    }
}
