//! Giving a claim back to the scheduler when its node cannot provide the volume and another could.
//!
//! The scheduler writes the node it chose into the claim and waits. When that is taken out again it tries the pod anew, and the
//! capacity that is published meanwhile keeps it from the same choice. It may make it all the same: then the
//! back-off spaces the attempts, so the two do not chase each other.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
    runtime::reflector::ObjectRef,
};
use loopfs::ErrorKind;
use serde_json::{Value, json};

use crate::{
    error::Error,
    node::context::Context,
    objects::{identity::Identity, ownership},
    store::volumes::StorageError,
};

/// The patch that gives a claim back after a failed attempt to provision it, if another node could do better.
pub(crate) fn plan(claim: &PersistentVolumeClaim, failure: &Error, identity: &Identity) -> Option<Value> {
    let elsewhere = match failure {
        Error::Storage(StorageError::Volume(error)) => error.kind == ErrorKind::NoSpace,
        Error::SourceElsewhere { .. } => true,
        _ => false,
    };
    let chosen =
        ownership::bound_volume(claim).is_none() && ownership::selected_node(claim) == Some(identity.node());
    (elsewhere && chosen).then(|| {
        json!({ "metadata": {
            // Both are preconditions: the API server answers 409 when either differs.
            "uid": claim.metadata.uid,
            "resourceVersion": claim.metadata.resource_version,
            "annotations": { ownership::SELECTED_NODE: null },
        } })
    })
}

/// Gives it back.
///
/// # Errors
/// When the API server does not take it; the next failed attempt tries again.
pub(crate) async fn apply(claim: &PersistentVolumeClaim, patch: &Value, ctx: &Context) -> Result<(), Error> {
    let api = ctx.cluster.claim_api(&claim.namespace().unwrap_or_default());
    match api.patch(&claim.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(written) => {
            ctx.claim_writes.remember(written.into_inner());
            Ok(())
        }
        Err(error) => {
            ctx.claim_writes.forget(&ObjectRef::from_obj(claim));
            Err(Error::api("give back to the scheduler claim", claim.name_any(), error))
        }
    }
}

#[cfg(test)]
mod tests {
    use loopfs::VolumeId;
    use rstest::rstest;

    use super::*;
    use crate::testing::{fake_store, fixtures};

    fn refused(kind: ErrorKind) -> Error {
        StorageError::from(fake_store::error(kind, "no")).into()
    }

    #[rstest]
    #[case::full(json!({}), refused(ErrorKind::NoSpace), true)]
    #[case::to_be_copied_elsewhere(json!({}), Error::SourceElsewhere { source_object: "claim \"a\"".to_owned(), node: "node-b".to_owned() }, true)]
    #[case::busy(json!({}), refused(ErrorKind::Busy), false)]
    #[case::not_mounted(json!({}), StorageError::Unavailable("mount it".to_owned()).into(), false)]
    #[case::under_way(json!({}), Error::InFlight(VolumeId::parse("pvc-1").unwrap()), false)]
    #[case::chosen_by_nobody(json!({"metadata": {"annotations": null}}), refused(ErrorKind::NoSpace), false)]
    #[case::sent_on(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: "node-b"}}}), refused(ErrorKind::NoSpace), false)]
    #[case::bound(json!({"spec": {"volumeName": "v"}}), refused(ErrorKind::NoSpace), false)]
    fn only_what_another_node_could_do_is_given_back(
        #[case] change: Value,
        #[case] failure: Error,
        #[case] expected: bool,
    ) {
        let patch = plan(&fixtures::claim(change), &failure, &fixtures::identity());
        let expected = expected.then(|| {
            json!({"metadata": {
                "uid": fixtures::CLAIM_UID, "resourceVersion": "100",
                "annotations": {"volume.kubernetes.io/selected-node": null},
            }})
        });
        assert_eq!(patch, expected);
    }
}
