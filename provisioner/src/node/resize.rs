//! Expands a volume whose claim requests more, by the protocol of the kubelet and external-resizer.
//!
//! `RecoverVolumeExpansionFailure` keeps the attempted size (`allocatedResources`) and its state (`allocatedResourceStatuses`) in
//! the claim's status, so that a user may request less after a failure. The store expands a volume in milliseconds, the call can
//! be repeated, and it never shrinks. So no outcome is uncertain, as it is for external-resizer after a timeout: the size that
//! counts is always the one that the store returns.
//!
//! The expansion of a Filesystem volume is complete then, because its quota is its size. The capacity of a Block volume's loop
//! devices must be refreshed. The node's CSI driver does that when it has expanded the image. If it fails, the kubelet does the last
//! step: after `NodeResizePending` it calls NodeExpandVolume when it next syncs the pod, a minute or more later.

use std::sync::Arc;

use csi_wire::volumes::ExpandResponse;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use loopfs::volume_store::{VolumeId, VolumeKind};
use loopfs::{Bytes, ErrorKind};
use serde_json::{Value, json};

use crate::api::events::Reason;
use crate::error::Error;
use crate::node::context::Context;
use crate::objects::claim_status::{
    Earlier, ResizeCondition, ResizeStatus, STORAGE, StatusPatch, recorded, requested, requested_expansion,
};
use crate::objects::identity::Identity;
use crate::objects::{ownership, quantity};
use crate::store::driver::StorageError;

/// The action for a bound claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResizePlan {
    /// The volume has the requested size, or belongs to another node or driver.
    UpToDate,
    /// The kubelet does the next step.
    AwaitNode,
    /// Expand the volume to at least this size.
    Expand { target: Bytes },
}

/// Decides what to do about a bound claim.
pub(crate) fn plan(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
    identity: &Identity,
) -> ResizePlan {
    let status = claim.status.as_ref();
    let bound = status.and_then(|status| status.phase.as_deref()) == Some("Bound")
        && ownership::bound_volume(claim) == volume.metadata.name.as_deref();
    if !bound || !ownership::is_our_volume(volume, identity) || !ownership::is_volume_of(volume, claim) {
        return ResizePlan::UpToDate;
    }
    let Some(target) = requested_expansion(claim) else { return ResizePlan::UpToDate };
    let node_has_its_turn = match (kind(volume), ResizeStatus::of(claim)) {
        (VolumeKind::Block, Some(ResizeStatus::NodeInProgress)) => true,
        // The kubelet has not started, so a further increase of the request does not wait for it.
        (VolumeKind::Block, Some(ResizeStatus::NodePending)) => {
            target <= capacity(volume).unwrap_or_default()
        }
        _ => false,
    };
    if node_has_its_turn { ResizePlan::AwaitNode } else { ResizePlan::Expand { target } }
}

/// The outcome of expanding the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExpansionOutcome {
    /// The volume has this size, and its pod sees it.
    Expanded(Bytes),
    /// The volume has this size; the capacity of the pod's block device may not be refreshed yet.
    AwaitsNode(Bytes),
    /// The volume is smaller, and there is no space for this size; requesting less may succeed.
    NoSpace(String),
    /// Requesting less may succeed.
    Infeasible(String),
    /// The expansion failed; a retry may succeed.
    Failed(String),
}

/// Returns the patch of the claim's status before the expansion, or `None` if the status has these values already.
pub(crate) fn begin(claim: &PersistentVolumeClaim, target: Bytes, now: Timestamp) -> Option<Value> {
    let allocated = allocated(claim);
    let resumes = ResizeStatus::of(claim) == Some(ResizeStatus::ControllerInProgress);
    let infeasible = ResizeStatus::of(claim) == Some(ResizeStatus::ControllerInfeasible);
    // The volume can have the size of an earlier attempt, for which the quota stays charged until the outcome of this one is known.
    let charged = target.max(allocated.unwrap_or_default());
    let again = allocated == Some(charged);
    // A smaller size than the one that was infeasible may succeed.
    let was_infeasible = infeasible && charged <= target.round_up().unwrap_or(target);
    if again && (resumes || was_infeasible) {
        // A retry with the same size: the status of the earlier attempt stays until this attempt ends differently.
        return None;
    }
    StatusPatch::of(claim)
        .allocated(charged)
        .resize_status(Some(ResizeStatus::ControllerInProgress))
        .condition(Some((ResizeCondition::Resizing, String::new())), Earlier::Drop, now)
        .node_expansion_not_required(false)
        .build()
}

/// Returns the size for which the quota is charged while the claim is resized.
fn allocated(claim: &PersistentVolumeClaim) -> Option<Bytes> {
    recorded(claim.status.as_ref()?.allocated_resources.as_ref())
}

/// Returns the size for which the quota is charged after the volume got a size: at most the requested size, as the store rounds it, or
/// the size of an earlier attempt. An admission policy refuses more. A volume that an administrator created by hand can be larger.
fn allocated_for(claim: &PersistentVolumeClaim, size: Bytes) -> Bytes {
    size.min(rounded_request(claim).unwrap_or_default().max(allocated(claim).unwrap_or_default()))
}

/// Returns the requested size, as the store rounds it.
fn rounded_request(claim: &PersistentVolumeClaim) -> Option<Bytes> {
    requested(claim).ok().flatten().and_then(Bytes::round_up)
}

/// The writes that record an outcome, in this order.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ResizeRecord {
    /// The patch of the PersistentVolume. It comes first, so that a claim never has more than its PersistentVolume.
    pub(crate) volume: Option<Value>,
    /// The patch of the claim's status.
    pub(crate) claim: Option<Value>,
}

/// Returns the writes after the expansion.
pub(crate) fn record(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
    outcome: &ExpansionOutcome,
    now: Timestamp,
) -> ResizeRecord {
    match outcome {
        ExpansionOutcome::Expanded(size) => ResizeRecord {
            volume: volume_patch(volume, *size),
            claim: StatusPatch::of(claim)
                .allocated(allocated_for(claim, *size))
                .capacity(*size)
                .resize_status(None)
                .condition(None, Earlier::Drop, now)
                .node_expansion_not_required(true)
                .build(),
        },
        ExpansionOutcome::AwaitsNode(size) => {
            let message =
                "the volume was expanded; waiting for the kubelet to refresh the capacity of the pod's block device".to_owned();
            let pending = Some((ResizeCondition::FileSystemResizePending, message));
            let claim = StatusPatch::of(claim)
                .allocated(allocated_for(claim, *size))
                .resize_status(Some(ResizeStatus::NodePending))
                .condition(pending, Earlier::Drop, now)
                .node_expansion_not_required(false)
                .build();
            ResizeRecord { volume: volume_patch(volume, *size), claim }
        }
        ExpansionOutcome::NoSpace(why) => {
            let status = failure(claim, why, now).resize_status(Some(ResizeStatus::ControllerInfeasible));
            // The volume is smaller than this request, so the quota need not be charged for more.
            let smaller = allocated(claim).zip(rounded_request(claim));
            let status = match smaller {
                Some((allocated, requested)) => status.allocated(allocated.min(requested)),
                None => status,
            };
            ResizeRecord { volume: None, claim: status.build() }
        }
        ExpansionOutcome::Infeasible(why) => {
            // If more than the request is charged, the earlier attempt goes on. Otherwise `begin` would write at each retry.
            let more = rounded_request(claim).is_some_and(|requested| allocated(claim) > Some(requested));
            let status =
                if more { ResizeStatus::ControllerInProgress } else { ResizeStatus::ControllerInfeasible };
            ResizeRecord { volume: None, claim: failure(claim, why, now).resize_status(Some(status)).build() }
        }
        ExpansionOutcome::Failed(why) => {
            ResizeRecord { volume: None, claim: failure(claim, why, now).build() }
        }
    }
}

fn failure<'a>(claim: &'a PersistentVolumeClaim, why: &str, now: Timestamp) -> StatusPatch<'a> {
    StatusPatch::of(claim).condition(
        Some((ResizeCondition::ControllerResizeError, why.to_owned())),
        Earlier::Keep,
        now,
    )
}

/// Returns the patch that raises the capacity of a PersistentVolume. It never lowers the capacity.
fn volume_patch(volume: &PersistentVolume, size: Bytes) -> Option<Value> {
    (capacity(volume).unwrap_or_default() < size).then(|| {
        json!({
            "metadata": { "uid": volume.metadata.uid, "resourceVersion": volume.metadata.resource_version },
            "spec": { "capacity": { STORAGE: quantity::format(size) } },
        })
    })
}

fn capacity(volume: &PersistentVolume) -> Option<Bytes> {
    recorded(volume.spec.as_ref()?.capacity.as_ref())
}

fn kind(volume: &PersistentVolume) -> VolumeKind {
    match volume.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref()) {
        Some("Block") => VolumeKind::Block,
        _ => VolumeKind::Filesystem,
    }
}

/// Expands the volume and records the outcome.
///
/// # Errors
/// When the expansion failed (which is then recorded in the claim), or a write failed. The next attempt continues from there.
pub(crate) async fn apply(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
    target: Bytes,
    ctx: &Context,
) -> Result<(), Error> {
    let id = ownership::volume_id(volume, &ctx.cluster.identity)?;
    let begun = match begin(claim, target, (ctx.now)()) {
        Some(patch) => {
            let note = format!("expanding volume {id} to {target}");
            ctx.cluster.events.publish(claim, Reason::Resizing, note);
            Some(patch_claim(claim, &patch, ctx).await?)
        }
        None => None,
    };
    let claim = begun.as_deref().unwrap_or(claim);

    let expanded = expand(&id, target, volume, ctx).await;
    if expanded.as_ref().is_err_and(Error::is_conflict) {
        // The expansion has not begun.
        return expanded.map(drop);
    }
    let outcome = outcome(&expanded, kind(volume));
    let record = record(claim, volume, &outcome, (ctx.now)());
    if let Some(patch) = &record.volume {
        let name = volume.name_any();
        let patched =
            ctx.cluster.volume_api().patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
        ctx.volumes
            .remember(volume, patched)
            .map_err(|error| Error::api("record the new capacity of PersistentVolume", &name, error))?;
    }
    if let Some(patch) = &record.claim {
        patch_claim(claim, patch, ctx).await?;
    }
    expanded?;
    match outcome {
        ExpansionOutcome::Expanded(size) => {
            ctx.cluster.events.publish(
                claim,
                Reason::VolumeResizeSuccessful,
                format!("volume {id} now has {size}"),
            );
        }
        ExpansionOutcome::AwaitsNode(size) => {
            let note = format!(
                "volume {id} now has {size}; the kubelet has yet to refresh the capacity of the pod's block device"
            );
            ctx.cluster.events.publish(claim, Reason::FileSystemResizeRequired, note);
        }
        ExpansionOutcome::NoSpace(_) | ExpansionOutcome::Infeasible(_) | ExpansionOutcome::Failed(_) => {}
    }
    Ok(())
}

async fn expand(
    id: &VolumeId,
    target: Bytes,
    volume: &PersistentVolume,
    ctx: &Context,
) -> Result<ExpandResponse, Error> {
    let expected = ownership::filesystem_uuid(volume, &ctx.cluster.identity);
    Ok(ctx.storage.driver()?.expand(id, target, expected).await?)
}

fn outcome(expanded: &Result<ExpandResponse, Error>, kind: VolumeKind) -> ExpansionOutcome {
    match expanded {
        Ok(volume) if volume.devices_refreshed || kind == VolumeKind::Filesystem => {
            ExpansionOutcome::Expanded(Bytes(volume.capacity))
        }
        Ok(volume) => ExpansionOutcome::AwaitsNode(Bytes(volume.capacity)),
        Err(Error::Storage(StorageError::Volume(refused))) if refused.kind == ErrorKind::NoSpace => {
            ExpansionOutcome::NoSpace(refused.to_string())
        }
        Err(Error::Storage(StorageError::Volume(refused))) if refused.is_infeasible() => {
            ExpansionOutcome::Infeasible(refused.to_string())
        }
        Err(error) => ExpansionOutcome::Failed(error.to_string()),
    }
}

async fn patch_claim(
    claim: &PersistentVolumeClaim,
    patch: &Value,
    ctx: &Context,
) -> Result<Arc<PersistentVolumeClaim>, Error> {
    let api = ctx.cluster.claim_api(&claim.namespace().unwrap_or_default());
    let patched = api.patch_status(&claim.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await;
    ctx.claims
        .remember(claim, patched)
        .map_err(|error| Error::api("record the resize in the status of claim", claim.name_any(), error))
}

#[cfg(test)]
mod tests;
