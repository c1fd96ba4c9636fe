//! What to do about one volume of a node that is gone. Pure.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;

use crate::objects::{
    identity::Identity,
    loss_policy::{OnNodeLoss, Policy},
    ownership, pv,
};

/// What is known when the decision is made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sight<'a> {
    pub(crate) volume: &'a PersistentVolume,
    /// The node that is gone, or whose disk is.
    pub(crate) node: &'a str,
    /// What is at present under the name that the volume gives as its claim's.
    pub(crate) claim: Option<&'a PersistentVolumeClaim>,
    /// For how long it has been seen to be gone, without a break.
    pub(crate) gone: Duration,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Nothing, and nobody waits for anything.
    Leave,
    /// Nothing before this time has passed.
    Wait(Duration),
    /// Something else goes on, which ends without this.
    Await,
    /// Say that it is kept.
    Report,
    /// Delete the claim.
    DeleteClaim,
    /// Delete the volume's object, which stays for as long as the claim does.
    DeleteVolume,
    /// Delete the volume's object, and let it go: what the node has of it is the node's.
    LetGo,
}

/// Decides.
pub(crate) fn decide(sight: Sight<'_>, identity: &Identity) -> Decision {
    let Sight { volume, node, claim, gone } = sight;
    if !ownership::is_only_on(volume, node, identity) {
        return Decision::Leave;
    }
    let policy = Policy::of(volume, identity);
    if gone < policy.grace {
        return Decision::Wait(policy.grace - gone);
    }
    // A claim made anew under the name of the volume's is none of this.
    let claim = claim.filter(|claim| {
        ownership::is_volume_of(volume, claim)
            && ownership::bound_volume(claim).is_none_or(|name| name == volume.name_any())
    });
    let claim_going = claim.is_some_and(|claim| claim.metadata.deletion_timestamp.is_some());
    let going = volume.metadata.deletion_timestamp.is_some();
    let spec = volume.spec.as_ref();
    let deletes = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref()) == Some("Delete");
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
    let held = volume.finalizers().iter().any(|finalizer| finalizer == pv::FINALIZER);
    match (policy.on_node_loss, claim.is_some()) {
        (OnNodeLoss::Retain, _) => Decision::Report,
        (_, true) if claim_going => Decision::Await,
        (OnNodeLoss::DeleteClaim, true) => Decision::DeleteClaim,
        // The object is the only record of where the data is, and somebody wants that kept.
        (_, _) if !deletes => Decision::Report,
        (OnNodeLoss::DeleteVolume, true) if going => Decision::Await,
        (OnNodeLoss::DeleteVolume, true) => Decision::DeleteVolume,
        (_, false) if phase != Some("Released") => Decision::Await,
        // Somebody else's finalizers hold it.
        (_, false) if going && !held => Decision::Await,
        (_, false) => Decision::LetGo,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    const NODE: &str = "node-a";
    const GOING: &str = "2026-01-01T00:00:00Z";

    /// A volume with a policy, and a change.
    fn volume(policy: &str, change: Value) -> PersistentVolume {
        let mut whole = json!({"metadata": {"annotations": {
            "csi.loopfs.dev/on-node-loss": policy, "csi.loopfs.dev/node-loss-grace-seconds": "60",
        }}});
        fixtures::merge_keeping_nulls(&mut whole, change);
        fixtures::volume(whole)
    }

    fn decided(volume: &PersistentVolume, claim: Option<Value>, gone: u64) -> Decision {
        let claim = claim.map(fixtures::bound_claim);
        let sight = Sight { volume, node: NODE, claim: claim.as_ref(), gone: Duration::from_secs(gone) };
        decide(sight, &fixtures::identity())
    }

    fn bound() -> Option<Value> {
        Some(json!({}))
    }

    fn going() -> Option<Value> {
        Some(json!({"metadata": {"deletionTimestamp": GOING}}))
    }

    fn made_anew() -> Option<Value> {
        Some(json!({"metadata": {"uid": "another"}}))
    }

    #[rstest]
    #[case::retain("retain", json!({}), bound(), Decision::Report)]
    #[case::retain_released("retain", json!({"status": {"phase": "Released"}}), None, Decision::Report)]
    #[case::retain_going("retain", json!({"status": {"phase": "Released"}, "metadata": {"deletionTimestamp": GOING}}), None, Decision::Report)]
    #[case::nonsense("delete", json!({}), bound(), Decision::Report)]
    #[case::volume_bound("deleteVolume", json!({}), bound(), Decision::DeleteVolume)]
    #[case::volume_marked("deleteVolume", json!({"metadata": {"deletionTimestamp": GOING}}), bound(), Decision::Await)]
    #[case::volume_of_a_going_claim("deleteVolume", json!({}), going(), Decision::Await)]
    #[case::volume_released("deleteVolume", json!({"status": {"phase": "Released"}}), None, Decision::LetGo)]
    #[case::volume_released_and_marked("deleteVolume", json!({"status": {"phase": "Released"}, "metadata": {"deletionTimestamp": GOING}}), None, Decision::LetGo)]
    #[case::volume_not_released_yet("deleteVolume", json!({}), None, Decision::Await)]
    #[case::volume_no_status("deleteVolume", json!({"status": null}), None, Decision::Await)]
    #[case::volume_let_go("deleteVolume", json!({"status": {"phase": "Released"}, "metadata": {"deletionTimestamp": GOING, "finalizers": ["other"]}}), None, Decision::Await)]
    #[case::volume_retained("deleteVolume", json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}), bound(), Decision::Report)]
    #[case::volume_retained_and_released("deleteVolume", json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), None, Decision::Report)]
    #[case::claim_bound("deleteClaim", json!({}), bound(), Decision::DeleteClaim)]
    #[case::claim_going("deleteClaim", json!({}), going(), Decision::Await)]
    #[case::claim_not_bound_yet("deleteClaim", json!({"status": {"phase": "Available"}}), Some(json!({"spec": {"volumeName": null}})), Decision::DeleteClaim)]
    #[case::claim_gone("deleteClaim", json!({}), None, Decision::Await)]
    #[case::claim_gone_and_released("deleteClaim", json!({"status": {"phase": "Released"}}), None, Decision::LetGo)]
    #[case::claim_made_anew("deleteClaim", json!({"status": {"phase": "Released"}}), made_anew(), Decision::LetGo)]
    #[case::claim_made_anew_before_release("deleteClaim", json!({}), made_anew(), Decision::Await)]
    #[case::claim_of_another_volume("deleteClaim", json!({}), Some(json!({"spec": {"volumeName": "pvc-other"}})), Decision::Await)]
    #[case::claim_of_a_retained_volume("deleteClaim", json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}), bound(), Decision::DeleteClaim)]
    #[case::retained_and_its_claim_gone("deleteClaim", json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), None, Decision::Report)]
    #[case::claimed_by_nobody("deleteClaim", json!({"spec": {"claimRef": null}, "status": {"phase": "Available"}}), None, Decision::Await)]
    #[case::of_another_node("deleteClaim", json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}), bound(), Decision::Leave)]
    #[case::of_another_driver("deleteClaim", json!({"spec": {"csi": {"driver": "csi.other.dev"}}}), bound(), Decision::Leave)]
    #[case::on_any_node("deleteClaim", json!({"spec": {"nodeAffinity": null}}), bound(), Decision::Leave)]
    fn decides(
        #[case] policy: &str,
        #[case] change: Value,
        #[case] claim: Option<Value>,
        #[case] expected: Decision,
    ) {
        let volume = volume(policy, change);
        assert_eq!(decided(&volume, claim.clone(), 60), expected);
        // Not a moment before, whatever it would be.
        let before =
            if expected == Decision::Leave { expected } else { Decision::Wait(Duration::from_secs(1)) };
        assert_eq!(decided(&volume, claim, 59), before);
    }
}
