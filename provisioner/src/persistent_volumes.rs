//! The controller of this node's volumes' objects.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::{
    Api, ResourceExt,
    runtime::{
        controller::Action,
        reflector::{ObjectRef, store::Writer},
        watcher::{self, Event},
    },
};
use tokio::sync::mpsc;

use crate::{
    context::{Circumstances, Context},
    controller, delete,
    error::Error,
    events::Reason,
    ownership,
};

/// After a conflict: the watch will have brought the object's newer form by then.
const CONFLICT_RETRY: Duration = Duration::from_millis(200);

/// Runs until `stop` is done and what was under way has ended. Claims whose volumes change are sent to `related`.
pub(crate) async fn run(
    ctx: Arc<Context>,
    cache: Writer<PersistentVolume>,
    related: mpsc::UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let selector = format!("{}={}", ctx.identity.node_label(), ctx.identity.node());
    let identity = ctx.identity.clone();
    let of_interest = move |volume: &PersistentVolume| ownership::is_our_volume(volume, &identity);
    let config = watcher::Config::default().labels(&selector);
    let events = controller::watch(Api::all(ctx.client.clone()), config, cache, of_interest);
    let observer = Arc::clone(&ctx);
    let touched = events.filter_map(move |event| std::future::ready(observe(event, &observer, &related)));
    let retried =
        controller::second_chances(Arc::clone(&ctx), |ctx: &Context| &ctx.chances, |ctx| &ctx.volume_backoff);
    let queue = stream::select(touched, retried);
    controller::run(queue, ctx.volumes.clone(), reconcile, ctx, stop).await;
}

/// What an event means: a volume to reconcile, and its claim with it, or one to forget.
fn observe(
    event: Event<PersistentVolume>,
    ctx: &Context,
    related: &mpsc::UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
) -> Option<ObjectRef<PersistentVolume>> {
    match event {
        Event::Apply(volume) | Event::InitApply(volume) => {
            if let Some(claim) = claim_of(&volume) {
                // Nobody listens any more once the process is on its way out.
                drop(related.send(claim));
            }
            Some(ObjectRef::from_obj(&volume))
        }
        Event::Delete(volume) => {
            let key = ObjectRef::from_obj(&volume);
            ctx.volume_writes.forget(&key);
            ctx.volume_backoff.clear(&key);
            None
        }
        Event::Init => None,
        Event::InitDone => {
            let is_cached = |key: &ObjectRef<PersistentVolume>| ctx.volumes.get(key).is_some();
            ctx.volume_writes.retain(is_cached);
            ctx.volume_backoff.retain(is_cached);
            None
        }
    }
}

fn claim_of(volume: &PersistentVolume) -> Option<ObjectRef<PersistentVolumeClaim>> {
    let reference = volume.spec.as_ref()?.claim_ref.as_ref()?;
    Some(ObjectRef::new(reference.name.as_deref()?).within(reference.namespace.as_deref()?))
}

async fn reconcile(cached: Arc<PersistentVolume>, ctx: Arc<Context>) -> Action {
    ctx.synced().await;
    let volume = ctx.volume_writes.newest(cached);
    let key = ObjectRef::from_obj(&*volume);
    let circumstances = Circumstances {
        uid: volume.uid(),
        volume_version: volume.resource_version(),
        chance: ctx.chances.current(),
        ..Default::default()
    };
    if let Some(wait) = ctx.volume_backoff.remaining(&key, &circumstances, Instant::now()) {
        return Action::requeue(wait);
    }
    match attempt(&volume, &ctx).await {
        Ok(()) => {
            ctx.volume_backoff.clear(&key);
            Action::await_change()
        }
        Err(error) if error.is_conflict() => {
            tracing::debug!(volume = %key, %error, "the object has moved on");
            Action::requeue(CONFLICT_RETRY)
        }
        Err(error) => {
            let wait = ctx.volume_backoff.failed(key, circumstances, Instant::now());
            tracing::debug!(reason = error.reason(), ?wait, "a volume is retried later");
            ctx.events.publish(&*volume, Reason::VolumeFailedDelete, error.to_string());
            Action::requeue(wait)
        }
    }
}

async fn attempt(volume: &PersistentVolume, ctx: &Context) -> Result<(), Error> {
    let plan = delete::plan(volume, &ctx.identity)?;
    delete::apply(volume, plan, ctx).await
}
