//! Deletes a released PersistentVolume and its data.
//!
//! The order of the steps makes this safe. First the provisioner marks the PersistentVolume for deletion, with the resource
//! version of the decision as a precondition: an administrator may have bound or retained it while the cache lagged behind. The
//! finalizer then keeps the PersistentVolume until its data is in the trash. A crash in between leaves a marked
//! PersistentVolume, with which the next attempt continues. It marks the PersistentVolume again, because an administrator can
//! still keep the data by another reclaim policy.
//!
//! The provisioner does the same for a PersistentVolume that no claim has bound, once a person deletes it.

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use loopfs::volume_store::VolumeId;

use crate::api::events::Reason;
use crate::error::Error;
use crate::node::context::Context;
use crate::node::references::{self, Labelled};
use crate::node::volume_deletion;
use crate::objects::identity::Identity;
use crate::objects::{ownership, pv};
use crate::requests::delete_unchanged;

/// The action for a PersistentVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeletionPlan {
    /// It belongs to another node or driver, or nothing has to be done.
    UpToDate,
    /// Its reclaim policy was changed to Delete: add the finalizer, so that it outlives its data.
    AddFinalizer,
    /// Its reclaim policy is not Delete: remove the finalizer. Its data stays, and users may delete the PersistentVolume.
    RemoveFinalizer,
    /// Its claim was deleted and its data stays: report where the data is.
    ReportRetained,
    /// Delete the data and the PersistentVolume.
    Delete(VolumeId),
}

/// Decides what to do about a PersistentVolume.
///
/// # Errors
/// When the volume has to be deleted but its handle is not a volume id.
pub(crate) fn plan(volume: &PersistentVolume, identity: &Identity) -> Result<DeletionPlan, Error> {
    if !ownership::is_our_volume(volume, identity) {
        return Ok(DeletionPlan::UpToDate);
    }
    let is_deleted = volume.metadata.deletion_timestamp.is_some();
    let phase = pv::phase(volume);
    Ok(match (pv::has_delete_policy(volume), pv::has_finalizer(volume)) {
        (false, true) => DeletionPlan::RemoveFinalizer,
        (false, false) if phase == Some("Released") => DeletionPlan::ReportRetained,
        (false, false) => DeletionPlan::UpToDate,
        // A user removed the finalizer: the PersistentVolume is deleted, and its data stays.
        (true, false) if is_deleted => DeletionPlan::UpToDate,
        (true, false) => DeletionPlan::AddFinalizer,
        (true, true) if pv::is_discarded(volume) => {
            DeletionPlan::Delete(ownership::volume_id(volume, identity)?)
        }
        (true, true) => DeletionPlan::UpToDate,
    })
}

/// Carries out the plan.
pub(crate) async fn apply(volume: &PersistentVolume, plan: DeletionPlan, ctx: &Context) -> Result<(), Error> {
    match plan {
        DeletionPlan::UpToDate => Ok(()),
        DeletionPlan::AddFinalizer => set_finalizer(volume, true, ctx).await,
        DeletionPlan::RemoveFinalizer => set_finalizer(volume, false, ctx).await,
        DeletionPlan::ReportRetained => {
            let id = ownership::volume_id(volume, &ctx.cluster.identity)?;
            let on = match ownership::filesystem_uuid(volume, &ctx.cluster.identity) {
                Some(uuid) => format!(" on file system {uuid}"),
                None => String::new(),
            };
            let note = format!(
                "the claim was deleted and the reclaim policy retains its data: volume {id}{on} of node {}; the volume occupies its \
                 space until you set persistentVolumeReclaimPolicy to Delete",
                ctx.cluster.identity.node()
            );
            ctx.cluster.events.publish(volume, Reason::VolumeRetained, note);
            Ok(())
        }
        DeletionPlan::Delete(id) => {
            ctx.storage.driver()?;
            let is_retry = ctx.volumes.has_failed(&ObjectRef::from_obj(volume));
            let labelled = if is_retry { Labelled::Listed } else { Labelled::Cached };
            references::require_none(&id, Some(volume), labelled, ctx).await?;
            mark(volume, ctx).await?;
            // Another task may be copying the volume. Until the finalizer is removed, the claim's reconcile must not create the
            // volume again: it would find this PersistentVolume, and leave a volume that no PersistentVolume names.
            let Some(_exclusive) = ctx.in_flight.enter(&id) else { return Err(Error::InFlight(id)) };
            let filesystem_uuid = ownership::filesystem_uuid(volume, &ctx.cluster.identity);
            let why = format!(
                "PersistentVolume {} is not used any more, and its reclaim policy is Delete",
                volume.name_any()
            );
            let owner = volume_deletion::owner_of(volume);
            volume_deletion::delete(&id, filesystem_uuid, owner, &why, ctx).await?;
            set_finalizer(volume, false, ctx).await
        }
    }
}

/// Marks the PersistentVolume for deletion. If it is marked already, that proves that it has not changed since the decision.
async fn mark(volume: &PersistentVolume, ctx: &Context) -> Result<(), Error> {
    let marked = delete_unchanged(&ctx.cluster.volume_api(), "delete PersistentVolume", volume).await;
    marked.inspect_err(|_| ctx.volumes.writes.forget(&ObjectRef::from_obj(volume)))
}

async fn set_finalizer(volume: &PersistentVolume, has_finalizer: bool, ctx: &Context) -> Result<(), Error> {
    let Some(patched) = ctx.cluster.set_finalizer(volume, has_finalizer).await? else { return Ok(()) };
    let key = ObjectRef::from_obj(volume);
    ctx.volumes.writes.remember(patched);
    // If this write removed the object, the watch may have reported that already and cleared the entry.
    if ctx.volumes.cache.get(&key).is_none() {
        ctx.volumes.writes.forget(&key);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    const DELETION_TIME: &str = "2026-01-01T00:00:00Z";

    #[rstest]
    #[case::bound(json!({}), DeletionPlan::UpToDate)]
    #[case::removed_by_hand_while_available_and_retained(json!({"status": {"phase": "Available"}, "metadata": {"deletionTimestamp": DELETION_TIME}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), DeletionPlan::RemoveFinalizer)]
    #[case::removed_by_hand_while_bound(json!({"metadata": {"deletionTimestamp": DELETION_TIME}}), DeletionPlan::UpToDate)]
    #[case::bound_again(json!({"status": {"phase": "Available"}}), DeletionPlan::UpToDate)]
    #[case::no_status(json!({"status": null}), DeletionPlan::UpToDate)]
    #[case::failed(json!({"status": {"phase": "Failed"}}), DeletionPlan::UpToDate)]
    #[case::released_without_finalizer(json!({"status": {"phase": "Released"}, "metadata": {"finalizers": null}}), DeletionPlan::AddFinalizer)]
    #[case::finalizer_removed(json!({"status": {"phase": "Released"}, "metadata": {"deletionTimestamp": DELETION_TIME, "finalizers": ["other"]}}), DeletionPlan::UpToDate)]
    #[case::changed_to_retain_while_marked(json!({"status": {"phase": "Released"}, "metadata": {"deletionTimestamp": DELETION_TIME}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), DeletionPlan::RemoveFinalizer)]
    #[case::retained(json!({"status": {"phase": "Released"}, "metadata": {"finalizers": null}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), DeletionPlan::ReportRetained)]
    #[case::retained_and_bound(json!({"metadata": {"finalizers": null}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), DeletionPlan::UpToDate)]
    #[case::no_policy(json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": null}}), DeletionPlan::RemoveFinalizer)]
    #[case::other_node(json!({"status": {"phase": "Released"}, "metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}), DeletionPlan::UpToDate)]
    fn plans(#[case] change: Value, #[case] expected: DeletionPlan) {
        assert_eq!(plan(&fixtures::volume(change), &fixtures::identity()).unwrap(), expected);
    }

    #[test]
    fn invalid_handle_is_an_error() {
        let change = json!({"status": {"phase": "Released"}, "spec": {"csi": {"volumeHandle": "../../etc"}}});
        let error = plan(&fixtures::volume(change), &fixtures::identity()).unwrap_err();
        assert_eq!(error.reason(), "InvalidHandle");
    }
}
