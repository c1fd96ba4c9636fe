//! The controller of claims: watches and queues them, reconciles each, and handles failures.
//!
//! # The states of a claim
//!
//! ```text
//!              select a node          create the volume         create the PV               bind
//! without node -------------> selected ---------------> pending --------------> provisioned ------> bound
//!      ^                         |                         |                                        |   ^
//!      +------ reschedule -------+                         | the claim is deleted        larger size|   | resized
//!                                                          v                                        v   |
//!                                                    volume deleted                               expanding
//! ```
//!
//! | state | who ends it | after a crash of this process |
//! |---|---|---|
//! | without node: no annotation of a selected node | the scheduler; for a class with the volumeBindingMode Immediate, the controller | |
//! | selected: the annotation names this node | this process creates the volume. If only another node can, it removes the annotation ([`reschedule`]) | the next attempt begins again |
//! | pending: the driver has the volume, whose record says that it has no PersistentVolume | this process creates the PersistentVolume. If the claim was deleted or got another PersistentVolume, [`cleanup`](super::cleanup) deletes the volume | the next attempt gets the same volume, because its id is derived from the UID of the claim |
//! | provisioned: the PersistentVolume refers to the claim | kube-controller-manager | the record of the volume may still say that it is pending. Cleanup finds the PersistentVolume and confirms the volume |
//! | bound | its user, who requests a larger size, or deletes the claim; then [`persistent_volumes`](super::persistent_volumes) deletes the volume | |
//! | expanding: `allocatedResourceStatuses` has the step | this process ([`resize`]), and the kubelet if the driver could not refresh a device | the status of the claim says which size was tried last, and a capacity only grows, so the expansion is repeated |

use std::sync::Arc;
use std::time::Instant;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::reflector::store::Writer;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::api::events::Reason;
use crate::api::queue::{self, CacheChange, Next, Slow, Workers};
use crate::error::Error;
use crate::node::context::{Context, RetryKey};
use crate::node::{data_source, placement, provision, reschedule, resize};
use crate::objects::claim_status::{self, ResizeStatus};
use crate::objects::data_source::{CopiedRef, DataSourceRef, parse_reference};
use crate::objects::ownership;

/// Claims reconciled concurrently. A reconcile mostly waits for the API server, and the store serialises what it must.
const CONCURRENCY: u16 = 32;

/// Claims whose volumes are copied concurrently, of all namespaces. Copying a directory of many files takes minutes.
const COPY_SLOTS: usize = 8;

/// Runs until `stop` completes and the reconciles in progress have ended. `related` delivers claims whose PersistentVolume or class
/// changed.
pub(crate) async fn run(
    ctx: Arc<Context>,
    cache: Writer<PersistentVolumeClaim>,
    related: mpsc::UnboundedReceiver<ObjectRef<PersistentVolumeClaim>>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let identity = ctx.cluster.identity.clone();
    let of_interest = move |claim: &PersistentVolumeClaim| ownership::is_claim_of_interest(claim, &identity);
    let changes = ctx.claim_scope.watch(&ctx.cluster, cache, of_interest);
    let observer = Arc::clone(&ctx);
    let touched = changes.filter_map(move |change| std::future::ready(observe(change, &observer)));
    let of_retries = Arc::clone(&ctx);
    let failed = move || of_retries.claims.backoff.keys();
    let retried = queue::requeue_failed(ctx.retry_generation.subscribe(), failed);
    let queue = stream::select(touched, stream::select(UnboundedReceiverStream::new(related), retried));
    let identity = ctx.cluster.identity.clone();
    let is_slow =
        move |claim: &_| ownership::selected_node(claim) == Some(identity.node()) && is_to_be_copied(claim);
    let copies = Slow { slots: COPY_SLOTS, is_slow: Box::new(is_slow) };
    let workers = Workers { concurrency: CONCURRENCY, slow: copies, depth: ctx.queues.queue("claims") };
    queue::run(workers, queue, ctx.claims.cache.clone(), reconcile, ctx, stop).await;
}

/// Returns `true` if the claim waits for a volume that is a copy.
fn is_to_be_copied(claim: &PersistentVolumeClaim) -> bool {
    ownership::bound_volume(claim).is_none()
        && matches!(parse_reference(claim), Ok(Some(DataSourceRef::Copied(_))))
}

/// Handles a change of the cache. Returns the claim to reconcile, if any.
fn observe(
    change: CacheChange<PersistentVolumeClaim>,
    ctx: &Context,
) -> Option<ObjectRef<PersistentVolumeClaim>> {
    match change {
        CacheChange::Applied(claim) => Some(ObjectRef::from_obj(&*claim)),
        CacheChange::Deleted(claim) => {
            let key = ObjectRef::from_obj(&*claim);
            ctx.claims.writes.forget(&key);
            ctx.claims.conflicts.clear(&key);
            // A claim that is rescheduled to another node may come back. Its back-off is kept for that case. Otherwise this node would
            // retry without any delay each time the scheduler selects it.
            if claim.metadata.deletion_timestamp.is_some() || ownership::bound_volume(&claim).is_some() {
                ctx.claims.backoff.clear(&key);
            }
            ctx.claims_deleted.notify_one();
            None
        }
        CacheChange::Listed => {
            // The claims of the list follow.
            ctx.claims.listed();
            ctx.claims_deleted.notify_one();
            None
        }
    }
}

/// The progress of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClaimProgress {
    /// There is nothing to do.
    UpToDate,
    /// This process has done its step; another component does the next one.
    Done,
    /// Another component or another node does the next step. The claim may come back, so its back-off is kept.
    Pending,
}

/// A failure and the reason of its event.
#[derive(Debug)]
struct ClaimFailure {
    reason: Reason,
    error: Error,
}

async fn reconcile(cached: Arc<PersistentVolumeClaim>, ctx: Arc<Context>) -> Next {
    ctx.synced().await;
    let claim = ctx.claims.writes.newest(cached);
    let key = ObjectRef::from_obj(&*claim);
    let retry_key = retry_key(&claim, &ctx);
    if let Some(wait) = ctx.claims.remaining(&key, &retry_key) {
        return Next::After(wait);
    }
    let attempted = attempt(&claim, &ctx).await;
    if !matches!(&attempted, Err(ClaimFailure { error, .. }) if error.is_conflict()) {
        ctx.claims.conflicts.clear(&key);
    }
    match attempted {
        Ok(ClaimProgress::UpToDate) => ctx.claims.backoff.clear(&key),
        // Without back-off, the kubelet would fail again and this process would request the resize again, in an endless loop.
        Ok(ClaimProgress::Done | ClaimProgress::Pending)
            if ResizeStatus::of(&claim) == Some(ResizeStatus::NodeInfeasible) =>
        {
            ctx.claims.failed(key, retry_key, false);
        }
        Ok(ClaimProgress::Done | ClaimProgress::Pending) => {}
        // Without a claim, nothing would clear its back-off.
        Err(ClaimFailure { error: Error::CopyEnded(_), .. }) if ctx.claims.cache.get(&key).is_none() => {}
        Err(ClaimFailure { error, .. }) if error.is_conflict() => {
            tracing::debug!(claim = %key, %error, "the claim changed in the meantime, or another task works on its volume; it is reconciled again");
            return Next::After(ctx.claims.conflicted(key));
        }
        Err(ClaimFailure { reason, error }) => {
            // The space of the failed copy itself is freed.
            let awaits_storage = error.awaits_storage() && !(error.is_no_space() && is_to_be_copied(&claim));
            let wait = ctx.claims.failed(key, retry_key, awaits_storage);
            tracing::debug!(reason = error.reason(), ?wait, "a claim is retried later");
            let class = class_of(&claim, &ctx);
            if reschedule::may_help(&claim, class.as_deref(), &error, &ctx.cluster.identity) {
                match reschedule::apply(&claim, &ctx).await {
                    Ok(()) => {
                        let note = format!(
                            "{error}; the provisioner removed the selected node from the claim, so that another one can be selected{}",
                            reschedule::siblings_on_this_node(&claim, &error, &ctx)
                        );
                        ctx.cluster.events.publish(&*claim, reason, note);
                        return Next::Change;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "could not return the claim to the scheduler; the next failed attempt retries")
                    }
                }
            }
            ctx.cluster.events.publish(&*claim, reason, error.to_string());
            return Next::After(wait);
        }
    }
    Next::Change
}

fn retry_key(claim: &PersistentVolumeClaim, ctx: &Context) -> RetryKey {
    let is_unbound = ownership::bound_volume(claim).is_none();
    let class = class_of(claim, ctx).filter(|_| is_unbound);
    let volume = ownership::volume_id_for(claim).ok().filter(|_| is_unbound);
    RetryKey {
        class_version: class.and_then(|class| class.resource_version()),
        // An attempt fails while a PersistentVolume has the name, and its deletion ends the wait.
        volume_version: volume.and_then(|id| ctx.volume(id.as_str())?.resource_version()),
        uid: claim.uid(),
        requested: claim_status::requested(claim).ok().flatten(),
        retry_generation: Some(*ctx.retry_generation.borrow()),
    }
}

fn class_of(claim: &PersistentVolumeClaim, ctx: &Context) -> Option<Arc<StorageClass>> {
    ctx.classes.get(&ObjectRef::new(ownership::class_name(claim)?))
}

async fn attempt(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<ClaimProgress, ClaimFailure> {
    let begun = Instant::now();
    let (operation, reason, outcome) = match ownership::bound_volume(claim) {
        None => ("provision", Reason::ProvisioningFailed, provision_volume(claim, ctx).await),
        Some(name) => ("resize", Reason::VolumeResizeFailed, resize_volume(claim, name, ctx).await),
    };
    match &outcome {
        Ok(ClaimProgress::Done) => ctx.operations.ended(operation, begun, Ok(())),
        // No attempt was made.
        Ok(_) => {}
        Err(error) => ctx.operations.ended(operation, begun, Err(error)),
    }
    outcome.map_err(|error| ClaimFailure { reason, error })
}

async fn provision_volume(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<ClaimProgress, Error> {
    let class = class_of(claim, ctx);
    let existing = ownership::volume_id_for(claim).ok().and_then(|id| ctx.volume(id.as_str()));
    if !ownership::is_claim_to_provision(claim, &ctx.cluster.identity) {
        return Ok(ClaimProgress::UpToDate);
    }
    if !placement::is_here(claim, class.as_deref(), ctx).await? {
        return Ok(ClaimProgress::Pending);
    }
    let reference = if existing.is_none() { parse_reference(claim)? } else { None };
    let data_source = match reference {
        None => None,
        Some(DataSourceRef::Copied(CopiedRef::Snapshot(name))) => {
            Some(data_source::find_snapshot(name, claim, ctx).await?)
        }
        Some(DataSourceRef::Copied(CopiedRef::Claim(name))) => {
            Some(data_source::find_volume(name, claim, ctx).await?)
        }
        Some(DataSourceRef::Populated { kind, name }) => {
            let note = format!(
                "the volume is left to the volume populator of the claim's data source, {kind} {name:?}; the claim gets the volume that \
                 the populator binds to it, and waits while no populator of this kind runs"
            );
            ctx.cluster.events.publish(claim, Reason::Provisioning, note);
            return Ok(ClaimProgress::Pending);
        }
    };
    let identity = &ctx.cluster.identity;
    match provision::plan(claim, class.as_deref(), existing.as_deref(), data_source, identity)? {
        None => Ok(ClaimProgress::UpToDate),
        Some(creation) => {
            provision::apply(claim, creation, ctx).await?;
            Ok(ClaimProgress::Done)
        }
    }
}

async fn resize_volume(
    claim: &PersistentVolumeClaim,
    name: &str,
    ctx: &Context,
) -> Result<ClaimProgress, Error> {
    // A PersistentVolume that is not in the cache belongs to another node, or requeues the claim when it arrives.
    let Some(volume) = ctx.volume(name) else { return Ok(ClaimProgress::UpToDate) };
    match resize::plan(claim, &volume, &ctx.cluster.identity) {
        resize::ResizePlan::UpToDate => Ok(ClaimProgress::UpToDate),
        resize::ResizePlan::AwaitNode => Ok(ClaimProgress::Pending),
        resize::ResizePlan::Expand { target } => {
            resize::apply(claim, &volume, target, ctx).await?;
            Ok(ClaimProgress::Done)
        }
    }
}

#[cfg(test)]
mod tests;
