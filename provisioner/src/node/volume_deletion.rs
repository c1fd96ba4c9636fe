//! Deletes the data of a volume, and leaves a trail.
//!
//! The log line says which volume was deleted, whose it was, and why. The event says the same to the owner of the claim. The claim itself was
//! usually deleted before, but the event stays in its namespace for as long as the API server keeps events. Of an orphaned volume, the
//! owner is unknown, and the event is on the node.

use std::fmt;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume};
use kube::Resource;
use loopfs::volume_store::VolumeId;

use crate::api::events::Reason;
use crate::error::Error;
use crate::node::context::Context;
use crate::objects::ownership;
use crate::store::claim_record::ClaimRecord;

/// Why a volume is deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rule {
    /// This PersistentVolume was released or deleted, and has the reclaim policy Delete.
    ReclaimPolicy(String),
    /// The claim was deleted before it had a PersistentVolume. The volume was pending.
    ClaimDeleted,
    /// The claim was bound to another PersistentVolume before it had this one. The volume was pending.
    ClaimBoundElsewhere,
    /// Another node has created a volume for the same claim.
    OnAnotherNode,
    /// The audits have found no PersistentVolume for this time, and the administrator has `--collect`.
    Orphaned(Duration),
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::ReclaimPolicy(volume) => {
                write!(f, "PersistentVolume {volume} is not used any more, and its reclaim policy is Delete")
            }
            Rule::ClaimDeleted => f.write_str("the claim was deleted before it had a PersistentVolume"),
            Rule::ClaimBoundElsewhere => f.write_str("the claim got another PersistentVolume"),
            Rule::OnAnotherNode => f.write_str("the claim got its volume on another node"),
            Rule::Orphaned(after) => {
                write!(f, "it had no PersistentVolume for {} s (--collect-after)", after.as_secs())
            }
        }
    }
}

/// The volume to delete, and whose it is. The caller has locked the volume.
#[derive(Debug)]
pub(crate) struct VolumeDeletion {
    pub(crate) id: VolumeId,
    /// The file system of the data, if it is known.
    pub(crate) filesystem_uuid: Option<String>,
    /// The claim, the PersistentVolume that no claim has bound, or the node if there is neither.
    pub(crate) owner: ObjectReference,
    pub(crate) rule: Rule,
}

/// Moves the data to the trash, where it is inaccessible. The driver frees its space in the background. Returns `false` if the
/// volume does not exist.
///
/// # Errors
/// When the data cannot be deleted.
pub(crate) async fn delete(deletion: VolumeDeletion, ctx: &Context) -> Result<bool, Error> {
    let VolumeDeletion { id, filesystem_uuid, owner, rule } = deletion;
    if !ctx.storage.driver()?.delete(&id, filesystem_uuid.as_deref()).await? {
        return Ok(false);
    }
    let (namespace, name) = (owner.namespace.clone(), owner.name.clone());
    tracing::info!(
        volume = %id, kind = owner.kind, namespace, name, uid = owner.uid, %rule, "deleted a volume and its data"
    );
    let note = format!("deleted volume {id} of node {} and its data: {rule}", ctx.cluster.identity.node());
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
    use kube::ResourceExt;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::TestContext;

    #[rstest]
    #[case::of_a_claim(json!({}), "PersistentVolumeClaim", "data")]
    #[case::of_no_claim(json!({"spec": {"claimRef": null}}), "PersistentVolume", fixtures::VOLUME)]
    #[case::reserved_for_a_claim(json!({"spec": {"claimRef": {"uid": null}}}), "PersistentVolume", fixtures::VOLUME)]
    fn owners(#[case] change: Value, #[case] kind: &str, #[case] name: &str) {
        let owner = owner_of(&fixtures::volume(change));
        assert_eq!((owner.kind.as_deref(), owner.name.as_deref()), (Some(kind), Some(name)));
    }

    #[rstest]
    #[case::of_an_existing_volume(true, &["VolumeDeleted"])]
    #[case::that_a_crash_interrupted(false, &[])]
    #[tokio::test]
    async fn a_deletion_leaves_one_event(#[case] exists: bool, #[case] events: &[&str]) {
        let test_context = TestContext::new(vec![]);
        let id = test_context.volumes.add(fixtures::VOLUME);
        if !exists {
            test_context.volumes.state().volumes.clear();
        }
        let volume = fixtures::volume(json!({}));
        let rule = Rule::ReclaimPolicy(volume.name_any());
        let deletion = VolumeDeletion { id, filesystem_uuid: None, owner: owner_of(&volume), rule };
        assert_eq!(delete(deletion, &test_context.ctx).await.unwrap(), exists);
        assert_eq!(test_context.finish().await, events);
    }
}
