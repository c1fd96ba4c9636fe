//! Deletes the data of a volume, and leaves a trail.
//!
//! The log line says which volume was deleted, whose it was, and why. The event says the same to the owner of the claim. The claim itself was
//! usually deleted before, but the event stays in its namespace for as long as the API server keeps events. Of an orphaned volume, the
//! owner is unknown, and the event is on the node.

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume};
use kube::Resource;
use loopfs::volume_store::VolumeId;

use crate::api::events::Reason;
use crate::error::Error;
use crate::node::context::Context;
use crate::objects::ownership;
use crate::store::claim_record::ClaimRecord;

/// The reason to delete a volume of a claim for which another node has created one.
pub(crate) const ON_ANOTHER_NODE: &str = "the claim got its volume on another node";

/// Moves the data of a volume, which the caller has locked, to the trash, where it is inaccessible. The driver frees its space in the
/// background. Returns `false` if the volume does not exist. `filesystem_uuid` is the file system of the data, if it is known. The event is
/// on `owner`: the claim, the PersistentVolume that no claim has bound, or the node if there is neither.
pub(crate) async fn delete(
    id: &VolumeId,
    filesystem_uuid: Option<&str>,
    owner: ObjectReference,
    why: &str,
    ctx: &Context,
) -> Result<bool, Error> {
    if !ctx.storage.driver()?.delete(id, filesystem_uuid).await? {
        return Ok(false);
    }
    let (namespace, name) = (owner.namespace.clone(), owner.name.clone());
    tracing::info!(
        volume = %id, kind = owner.kind, namespace, name, uid = owner.uid, why, "deleted a volume and its data"
    );
    let note = format!("deleted volume {id} of node {} and its data: {why}", ctx.cluster.identity.node());
    ctx.cluster.events.publish_about(owner, Reason::VolumeDeleted, note);
    Ok(true)
}

/// Returns the owner of the data of a PersistentVolume.
pub(crate) fn owner_of(volume: &PersistentVolume) -> ObjectReference {
    ownership::referenced_claim(volume).unwrap_or_else(|| volume.object_ref(&()))
}

/// Returns the claim of a pending volume.
pub(crate) fn owner_from(claim: &ClaimRecord) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        namespace: Some(claim.namespace.clone()),
        name: Some(claim.name.clone()),
        uid: Some(claim.uid.clone()),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    #[rstest]
    #[case::of_a_claim(json!({}), "PersistentVolumeClaim", "data")]
    #[case::of_no_claim(json!({"spec": {"claimRef": null}}), "PersistentVolume", fixtures::VOLUME)]
    #[case::reserved_for_a_claim(json!({"spec": {"claimRef": {"uid": null}}}), "PersistentVolume", fixtures::VOLUME)]
    fn owners(#[case] change: Value, #[case] kind: &str, #[case] name: &str) {
        let owner = owner_of(&fixtures::volume(change));
        assert_eq!((owner.kind.as_deref(), owner.name.as_deref()), (Some(kind), Some(name)));
    }
}
