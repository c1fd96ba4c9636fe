//! The controller of claims: which are looked at, when, and what a failure leads to.

use std::{sync::Arc, time::Instant};

use futures::{StreamExt, stream};
use k8s_openapi::api::{core::v1::PersistentVolumeClaim, storage::v1::StorageClass};
use kube::{
    Api, ResourceExt,
    runtime::{
        controller::Action,
        reflector::{ObjectRef, store::Writer},
        watcher,
    },
};
use tokio::sync::mpsc;

use crate::{
    api::{
        events::Reason,
        queue::{self, CacheChange, Slow},
    },
    error::Error,
    metrics::Operation,
    node::{
        context::{Context, RetryKey},
        data_source, placement, provision, reschedule, resize,
    },
    objects::{
        claim_status::{self, ResizeStatus},
        ownership,
    },
};

/// Claims reconciled at once. Most of it is waiting for the API server; the store serialises what it must.
const CONCURRENCY: u16 = 32;

/// Claims whose volumes are copied concurrently. Copying a directory of many files takes minutes.
const COPY_CONCURRENCY: u16 = 4;

/// Runs until `stop` is done and what was under way has ended. `related` brings claims whose volumes changed.
pub(crate) async fn run(
    ctx: Arc<Context>,
    cache: Writer<PersistentVolumeClaim>,
    related: mpsc::UnboundedReceiver<ObjectRef<PersistentVolumeClaim>>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let identity = ctx.cluster.identity.clone();
    let of_interest = move |claim: &PersistentVolumeClaim| ownership::is_claim_of_interest(claim, &identity);
    let changes =
        queue::watch(Api::all(ctx.cluster.client.clone()), watcher::Config::default(), cache, of_interest);
    let observer = Arc::clone(&ctx);
    let touched = changes.filter_map(move |change| std::future::ready(observe(change, &observer)));
    let retried = queue::requeue_failed(
        Arc::clone(&ctx),
        |ctx: &Context| &ctx.retry_generation,
        |ctx| &ctx.claim_backoff,
    );
    let queue = stream::select(touched, stream::select(queue::receiver(related), retried));
    let copies = Slow { concurrency: COPY_CONCURRENCY, is_slow: is_to_be_copied };
    queue::run(CONCURRENCY, copies, queue, ctx.claims.clone(), reconcile, ctx, stop).await;
}

/// Returns `true` if the claim waits for a volume that is a copy.
fn is_to_be_copied(claim: &PersistentVolumeClaim) -> bool {
    ownership::bound_volume(claim).is_none() && matches!(data_source::reference(claim), Ok(Some(_)))
}

/// What a change means: a claim to reconcile, or one to forget.
fn observe(
    change: CacheChange<PersistentVolumeClaim>,
    ctx: &Context,
) -> Option<ObjectRef<PersistentVolumeClaim>> {
    match change {
        CacheChange::Applied(claim) => Some(ObjectRef::from_obj(&*claim)),
        CacheChange::Deleted(claim) => {
            let key = ObjectRef::from_obj(&*claim);
            ctx.claim_writes.forget(&key);
            ctx.claim_conflicts.clear(&key);
            // One that goes to another node may be sent back. What failed here is remembered for then, or the
            // scheduler's attempts would be answered as fast as they come.
            if claim.metadata.deletion_timestamp.is_some() || ownership::bound_volume(&claim).is_some() {
                ctx.claim_backoff.clear(&key);
            }
            ctx.claims_vanished.notify_one();
            None
        }
        CacheChange::Listed => {
            // Whatever vanished while nobody watched brings no event of its own.
            let is_cached = |key: &ObjectRef<PersistentVolumeClaim>| ctx.claims.get(key).is_some();
            ctx.claim_writes.retain(is_cached);
            ctx.claim_backoff.retain(is_cached);
            ctx.claim_conflicts.retain(is_cached);
            ctx.claims_vanished.notify_one();
            ctx.claims_synced.set();
            None
        }
    }
}

/// How far a claim has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// There is nothing to do.
    UpToDate,
    /// What this process has to do is done; somebody else's step is awaited.
    Done,
    /// Somebody else's step is awaited.
    Pending,
    /// Another node's, or nobody's yet. It may come back, and what happened here is remembered for then.
    Elsewhere,
    /// Nobody says whose it is. To be looked at again, though nothing about it changes.
    Requeue,
}

/// A failure and the event it is told by.
#[derive(Debug)]
struct Failure {
    reason: Reason,
    error: Error,
}

async fn reconcile(cached: Arc<PersistentVolumeClaim>, ctx: Arc<Context>) -> Action {
    ctx.synced().await;
    let claim = ctx.claim_writes.newest(cached);
    let key = ObjectRef::from_obj(&*claim);
    let retry_key = retry_key(&claim, &ctx);
    let now = Instant::now();
    let wait = ctx.claim_conflicts.remaining(&key, &(), now);
    if let Some(wait) = wait.or_else(|| ctx.claim_backoff.remaining(&key, &retry_key, now)) {
        return Action::requeue(wait);
    }
    let attempted = attempt(&claim, &ctx).await;
    if !matches!(&attempted, Err(Failure { error, .. }) if error.is_conflict()) {
        ctx.claim_conflicts.clear(&key);
    }
    match attempted {
        Ok(Progress::UpToDate) => ctx.claim_backoff.clear(&key),
        // The kubelet would refuse once more, and have to be asked once more, at once and for ever.
        Ok(Progress::Done | Progress::Pending)
            if ResizeStatus::of(&claim) == Some(ResizeStatus::NodeInfeasible) =>
        {
            ctx.claim_backoff.failed(key, retry_key, Instant::now());
        }
        Ok(Progress::Done | Progress::Pending | Progress::Elsewhere) => {}
        Ok(Progress::Requeue) => {
            return Action::requeue(ctx.claim_backoff.failed(key, retry_key, Instant::now()));
        }
        Err(Failure { error, .. }) if error.is_conflict() => {
            tracing::debug!(claim = %key, %error, "a conflict; the claim is retried");
            return Action::requeue(ctx.claim_conflicts.failed(key, (), Instant::now()));
        }
        Err(Failure { reason, error }) => {
            let wait = ctx.claim_backoff.failed(key, retry_key, Instant::now());
            tracing::debug!(reason = error.reason(), ?wait, "a claim is retried later");
            if let Some(patch) = reschedule::plan(&claim, &error, &ctx.cluster.identity) {
                match reschedule::apply(&claim, &patch, &ctx).await {
                    Ok(()) => {
                        let note = format!(
                            "{error}; the claim is given back to the scheduler, for another node to hold it"
                        );
                        ctx.cluster.events.publish(&*claim, reason, note);
                        return Action::await_change();
                    }
                    Err(error) => tracing::warn!(%error, "a claim that this node cannot hold stays with it"),
                }
            }
            ctx.cluster.events.publish(&*claim, reason, error.to_string());
            return Action::requeue(wait);
        }
    }
    Action::await_change()
}

fn retry_key(claim: &PersistentVolumeClaim, ctx: &Context) -> RetryKey {
    let class = class_of(claim, ctx).filter(|_| ownership::bound_volume(claim).is_none());
    RetryKey {
        class_version: class.and_then(|class| class.resource_version()),
        uid: claim.uid(),
        requested: claim_status::requested(claim).ok().flatten(),
        retry_generation: ctx.retry_generation.current(),
        ..Default::default()
    }
}

fn class_of(claim: &PersistentVolumeClaim, ctx: &Context) -> Option<Arc<StorageClass>> {
    ctx.classes.get(&ObjectRef::new(ownership::class_name(claim)?))
}

async fn attempt(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<Progress, Failure> {
    let begun = Instant::now();
    let (operation, reason, outcome) = match ownership::bound_volume(claim) {
        None => (Operation::Provision, Reason::ProvisioningFailed, provision_volume(claim, ctx).await),
        Some(name) => (Operation::Resize, Reason::VolumeResizeFailed, resize_volume(claim, name, ctx).await),
    };
    match &outcome {
        Ok(Progress::Done) => ctx.operations.ended(operation, begun, Ok(())),
        // There was nothing to do.
        Ok(_) => {}
        Err(error) => ctx.operations.ended(operation, begun, Err(error)),
    }
    outcome.map_err(|error| Failure { reason, error })
}

async fn provision_volume(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<Progress, Error> {
    let class = class_of(claim, ctx);
    let existing = ownership::volume_id_for(claim).ok().and_then(|id| ctx.volume(id.as_str()));
    if !ownership::is_claim_to_provision(claim, &ctx.cluster.identity) {
        return Ok(Progress::UpToDate);
    }
    let placement = placement::of(claim, class.as_deref(), ctx).await?;
    // Whether there is something to copy is asked only where it is to be copied.
    let data_source = match placement {
        placement::Placement::Here if existing.is_none() => data_source::find(claim, ctx).await?,
        _ => None,
    };
    match provision::plan(
        claim,
        class.as_deref(),
        existing.as_deref(),
        placement,
        data_source,
        &ctx.cluster.identity,
    )? {
        provision::Plan::Ignore => Ok(Progress::Elsewhere),
        provision::Plan::Requeue => Ok(Progress::Requeue),
        provision::Plan::UpToDate => Ok(Progress::UpToDate),
        provision::Plan::Create(creation) => {
            provision::apply(claim, creation, ctx).await?;
            Ok(Progress::Done)
        }
    }
}

async fn resize_volume(claim: &PersistentVolumeClaim, name: &str, ctx: &Context) -> Result<Progress, Error> {
    // One that is not in the cache is not ours, or brings the claim back when it arrives.
    let Some(volume) = ctx.volume(name) else { return Ok(Progress::UpToDate) };
    match resize::plan(claim, &volume, &ctx.cluster.identity) {
        resize::Plan::UpToDate => Ok(Progress::UpToDate),
        resize::Plan::AwaitNode => Ok(Progress::Pending),
        resize::Plan::Expand { target } => {
            resize::apply(claim, &volume, target, ctx).await?;
            Ok(Progress::Done)
        }
    }
}

#[cfg(test)]
mod tests;
