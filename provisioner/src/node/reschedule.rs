//! Reschedules a claim: returns it to the scheduler when its node cannot provide the volume but another node could.
//!
//! The scheduler writes the selected node into the claim and waits. When the provisioner removes that annotation, the scheduler
//! schedules the pod again. The capacity that this node has published in the meantime normally prevents the same choice. If the
//! scheduler chooses this node again anyway, back-off spaces the attempts.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};

use crate::api::events::some_names;
use crate::error::Error;
use crate::node::context::Context;
use crate::objects::identity::Identity;
use crate::objects::ownership;
use crate::objects::refusal::Refusal;
use crate::objects::topology::is_immediate;
use crate::store::driver::StorageError;

/// Returns `true` if another node could provision a claim after this failure.
///
/// If the class or the labels of the node have changed so that the class does not allow this node any more, neither the scheduler nor the
/// controller selects another node while this one is selected. For a class with the volumeBindingMode Immediate, this node was the only
/// one that the class allowed, so without such a change the controller would select it again.
pub(crate) fn may_help(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    failure: &Error,
    identity: &Identity,
) -> bool {
    let is_immediate = class.is_some_and(is_immediate);
    let elsewhere = match failure {
        Error::Storage(StorageError::Unavailable(_)) | Error::SourceElsewhere { .. } => !is_immediate,
        Error::Refused(Refusal::Topology { .. }) => true,
        _ => !is_immediate && failure.is_no_space(),
    };
    let chosen =
        ownership::bound_volume(claim).is_none() && ownership::selected_node(claim) == Some(identity.node());
    elsewhere && chosen
}

/// Returns how to go on if the pod of a claim that did not fit can run on no other node, as the end of the event about the claim. A claim
/// does not name its pod, but a pod uses claims of its own namespace, and mostly claims that were created at the same time.
pub(crate) fn siblings_on_this_node(claim: &PersistentVolumeClaim, failure: &Error, ctx: &Context) -> String {
    if !failure.is_no_space() {
        return String::new();
    }
    let is_here = |other: &PersistentVolumeClaim| {
        ownership::selected_node(other) == Some(ctx.cluster.identity.node())
            || ownership::bound_volume(other).is_some_and(|volume| ctx.volume(volume).is_some())
    };
    let distance = |other: &PersistentVolumeClaim| {
        let [one, other] = [claim, other].map(|claim| claim.metadata.creation_timestamp.as_ref());
        one.zip(other).map_or(u64::MAX, |(one, other)| one.0.as_second().abs_diff(other.0.as_second()))
    };
    let is_sibling = |other: &PersistentVolumeClaim| {
        other.metadata.namespace == claim.metadata.namespace
            && other.metadata.uid != claim.metadata.uid
            && is_here(other)
    };
    let siblings = ctx.claims.cache.state_filter(is_sibling).into_iter();
    let mut siblings: Vec<_> = siblings.map(|other| (distance(&other), other.name_any())).collect();
    if siblings.is_empty() {
        return String::new();
    }
    siblings.sort();
    let names = some_names(siblings.iter().map(|(_, name)| format!("{name:?}")));
    format!(
        "; if its pod also uses a claim of this node ({names}), the pod can run on no other: free space on the node, request less, or, to \
         give up the data of that claim, delete it and the pod"
    )
}

/// Reschedules the claim.
pub(crate) async fn apply(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<(), Error> {
    let api = ctx.cluster.claim_api(&claim.namespace().unwrap_or_default());
    let patch = Patch::Merge(ownership::selection_patch(claim, None));
    let patched = api.patch(&claim.name_any(), &PatchParams::default(), &patch).await;
    ctx.claims
        .remember(claim, patched)
        .map(drop)
        .map_err(|error| Error::api("return to the scheduler claim", claim.name_any(), error))
}

#[cfg(test)]
mod tests {
    use loopfs::ErrorKind;
    use loopfs::volume_store::VolumeId;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::{fake_store, fixtures};

    fn not_allowed() -> Error {
        Refusal::Topology { class: "loopfs".to_owned(), node: "node-a".to_owned() }.into()
    }

    fn refused(kind: ErrorKind) -> Error {
        StorageError::from(fake_store::error(kind, "no")).into()
    }

    #[rstest]
    #[case::full(json!({}), refused(ErrorKind::NoSpace), true)]
    #[case::to_be_copied_elsewhere(json!({}), Error::SourceElsewhere { source_object: "claim \"a\"".to_owned(), node: "node-b".to_owned() }, true)]
    #[case::busy(json!({}), refused(ErrorKind::Busy), false)]
    #[case::not_mounted(json!({}), StorageError::Unavailable("mount it".to_owned()).into(), true)]
    #[case::the_driver_restarts(json!({}), StorageError::Unanswered("no".to_owned()).into(), false)]
    #[case::not_opened_yet(json!({}), StorageError::Untried.into(), false)]
    #[case::not_allowed_any_more(json!({}), not_allowed(), true)]
    #[case::in_progress(json!({}), Error::InFlight(VolumeId::parse("pvc-1").unwrap()), false)]
    #[case::no_node_selected(json!({"metadata": {"annotations": null}}), refused(ErrorKind::NoSpace), false)]
    #[case::rescheduled(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: "node-b"}}}), refused(ErrorKind::NoSpace), false)]
    #[case::bound(json!({"spec": {"volumeName": "v"}}), refused(ErrorKind::NoSpace), false)]
    fn only_claims_provisionable_elsewhere_are_rescheduled(
        #[case] change: Value,
        #[case] failure: Error,
        #[case] expected: bool,
    ) {
        let class = fixtures::class(json!({}));
        let may_help = may_help(&fixtures::claim(change), Some(&class), &failure, &fixtures::identity());
        assert_eq!(may_help, expected);
    }

    #[rstest]
    #[case::not_allowed_any_more(not_allowed(), true)]
    #[case::full(refused(ErrorKind::NoSpace), false)]
    #[case::not_mounted(StorageError::Unavailable("mount it".to_owned()).into(), false)]
    fn immediate_claims_lose_only_forbidden_nodes(#[case] failure: Error, #[case] expected: bool) {
        let class = fixtures::class(json!({"volumeBindingMode": "Immediate"}));
        let may_help = may_help(&fixtures::claim(json!({})), Some(&class), &failure, &fixtures::identity());
        assert_eq!(may_help, expected);
    }
}
