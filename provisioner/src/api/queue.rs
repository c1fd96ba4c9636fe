//! Runs the queue of a controller, and watches only the objects of interest.

use std::{convert::Infallible, fmt::Debug, hash::Hash, panic::resume_unwind, sync::Arc};

use futures::{Stream, StreamExt};
use kube::{
    Api, Resource,
    runtime::{
        WatchStreamExt,
        controller::{Action, Config, Error, ReconcileRequest, applier},
        reflector::{ObjectRef, Store, store::Writer},
        watcher::{self, Event},
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::api::{backoff::Backoff, pruned::Pruned, signals::RetryGeneration};

/// A type of Kubernetes object.
pub(crate) trait Object:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
}
impl<K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static> Object for K {}

/// Objects whose reconciliation can take minutes.
pub(crate) struct Slow<K> {
    /// How many are reconciled concurrently, in addition to the others.
    pub(crate) concurrency: u16,
    pub(crate) is_slow: fn(&K) -> bool,
}

impl<K> Slow<K> {
    pub(crate) fn none() -> Self {
        Slow { concurrency: 1, is_slow: |_object| false }
    }
}

/// Reconciles the objects that `queue` names, `concurrency` at a time, until `stop` completes and the reconciliations in
/// progress have ended. Slow objects have a concurrency of their own, so that the others do not wait for them.
///
/// Each reconciliation is a task of its own, and so is the queue: parsing watch events takes processor time, and no
/// reconciliation should wait for that.
pub(crate) async fn run<K, Ctx, Reconciling>(
    concurrency: u16,
    slow: Slow<K>,
    queue: impl Stream<Item = ObjectRef<K>> + Send + 'static,
    cache: Store<K>,
    reconcile: impl Fn(Arc<K>, Arc<Ctx>) -> Reconciling,
    ctx: Arc<Ctx>,
    stop: impl Future<Output = ()> + Send + 'static,
) where
    K: Object,
    Reconciling: Future<Output = Action> + Send + 'static,
{
    let (named, turns) = mpsc::unbounded_channel();
    // Closed with the task: then the appliers end.
    let mut naming =
        AbortOnDropHandle::new(tokio::spawn(queue.take_until(Box::pin(stop)).for_each(move |object| {
            named.send(object).ok();
            std::future::ready(())
        })));
    // Only the cache knows which objects are slow. It wakes one waiter only, so the appliers begin to wait afterwards.
    tokio::select! {
        ready = cache.wait_until_ready() => if ready.is_err() { return },
        _stopped = &mut naming => return,
    }
    let (named_slow, slow_turns) = mpsc::unbounded_channel();
    let known = cache.clone();
    let turns = receiver(turns).filter_map(move |object| {
        let is_slow = known.get(&object).is_some_and(|object| (slow.is_slow)(&object));
        std::future::ready(if is_slow {
            named_slow.send(object).ok();
            None
        } else {
            Some(object)
        })
    });
    let reconcile = &reconcile;
    tokio::join!(
        apply(concurrency, turns, cache.clone(), reconcile, Arc::clone(&ctx)),
        apply(slow.concurrency, receiver(slow_turns), cache, reconcile, ctx),
    );
}

/// Reconciles the objects that `turns` names, until it ends and the reconciliations in progress have ended.
async fn apply<K, Ctx, Reconciling>(
    concurrency: u16,
    turns: impl Stream<Item = ObjectRef<K>>,
    cache: Store<K>,
    reconcile: &impl Fn(Arc<K>, Arc<Ctx>) -> Reconciling,
    ctx: Arc<Ctx>,
) where
    K: Object,
    Reconciling: Future<Output = Action> + Send + 'static,
{
    let queue = turns.map(|object| Ok::<_, Infallible>(ReconcileRequest::from(object)));
    let reconcile = |object, ctx| {
        let reconciling = AbortOnDropHandle::new(tokio::spawn(reconcile(object, ctx)));
        Box::pin(async move {
            let ended = reconciling.await;
            Ok::<_, Infallible>(ended.unwrap_or_else(|error| resume_unwind(error.into_panic())))
        })
    };
    let never = |_object: Arc<K>, never: &Infallible, _ctx: Arc<Ctx>| match *never {};
    let config = Config::default().concurrency(concurrency);
    let results = applier(reconcile, never, ctx, cache, queue, config);
    results
        .for_each(async |result| match result {
            Ok(_) => {}
            Err(Error::ObjectNotFound(object)) => tracing::trace!(%object, "deleted before its turn"),
            Err(error) => tracing::error!(%error, "a controller failed"),
        })
        .await;
}

/// Watches objects, keeps those of interest in `cache`, and passes on the events that changed the cache.
///
/// An object that is not of interest any more leaves the cache as if it were deleted. An object that never was of interest is
/// not stored, so memory does not grow with the objects of other nodes.
pub(crate) fn watch<K: Object>(
    api: Api<Pruned<K>>,
    config: watcher::Config,
    mut cache: Writer<K>,
    of_interest: impl Fn(&K) -> bool + Send + 'static,
) -> impl Stream<Item = Event<Pruned<K>>> + Send
where
    K::DynamicType: Hash + Eq,
{
    let cached = cache.as_reader();
    watcher::watcher(api, config).default_backoff().filter_map(move |event| {
        let change = match event {
            Ok(event) => narrow(event, &of_interest, |object| cached.get(object).is_some()),
            Err(error) => {
                tracing::warn!(%error, kind = %K::kind(&()), "a watch failed; it restarts with back-off");
                None
            }
        };
        std::future::ready(change.map(|change| kept(change, &mut cache)))
    })
}

fn narrow<K: Object>(
    event: Event<Pruned<K>>,
    of_interest: impl Fn(&K) -> bool,
    is_cached: impl Fn(&ObjectRef<K>) -> bool,
) -> Option<Event<Pruned<K>>> {
    match event {
        Event::Apply(object) | Event::Delete(object) if !of_interest(&object) => {
            is_cached(&ObjectRef::from_obj(&*object)).then_some(Event::Delete(object))
        }
        Event::InitApply(object) if !of_interest(&object) => None,
        event => Some(event),
    }
}

/// Applies the change to the cache and returns it.
fn kept<K: Object>(change: Event<Pruned<K>>, cache: &mut Writer<K>) -> Event<Pruned<K>>
where
    K::DynamicType: Hash + Eq,
{
    let change = map(change, Pruned::into_inner);
    cache.apply_watcher_event(&change);
    map(change, Pruned::from)
}

fn map<T, U>(event: Event<T>, change: impl FnOnce(T) -> U) -> Event<U> {
    match event {
        Event::Apply(object) => Event::Apply(change(object)),
        Event::InitApply(object) => Event::InitApply(change(object)),
        Event::Delete(object) => Event::Delete(change(object)),
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
    }
}

/// Returns a stream of the items of a channel.
pub(crate) fn receiver<T: Send + 'static>(
    channel: mpsc::UnboundedReceiver<T>,
) -> impl Stream<Item = T> + Send {
    futures::stream::unfold(
        channel,
        |mut channel| async move { channel.recv().await.map(|item| (item, channel)) },
    )
}

/// Returns the keys of all failed attempts, each time the retry generation increases.
pub(crate) fn requeue_failed<C, K, F>(
    ctx: Arc<C>,
    generation: fn(&C) -> &RetryGeneration,
    failed: fn(&C) -> &Backoff<K, F>,
) -> impl Stream<Item = K> + Send
where
    C: Send + Sync + 'static,
    K: Clone + Hash + Eq + Send + 'static,
    F: PartialEq + Send + 'static,
{
    let changes = generation(&ctx).subscribe();
    let changes_of_generation =
        futures::stream::unfold((ctx, changes), move |(ctx, mut changes)| async move {
            changes.changed().await.ok()?;
            let keys = failed(&ctx).keys();
            Some((futures::stream::iter(keys), (ctx, changes)))
        });
    changes_of_generation.flatten()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use std::time::Duration;

    use kube::{ResourceExt, runtime::reflector};
    use serde_json::json;
    use tokio::{sync::oneshot, time::timeout};

    use super::*;
    use crate::{api::signals::SyncSignal, objects::ownership, testing::fixtures};

    #[tokio::test]
    async fn slow_objects_do_not_hold_up_the_others() {
        let (cache, mut writer) = reflector::store();
        let names = ["slow-1", "slow-2", "slow-3", "quick"];
        writer.apply_watcher_event(&Event::Init);
        for name in names {
            let claim = fixtures::claim(json!({"metadata": {"name": name}}));
            writer.apply_watcher_event(&Event::InitApply(claim));
        }
        writer.apply_watcher_event(&Event::InitDone);
        let (begun, mut beginnings) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let signal = Arc::new(SyncSignal::default());
        let ctx = Arc::clone(&signal);
        let reconcile = move |claim: Arc<PersistentVolumeClaim>, signal: Arc<SyncSignal>| {
            let begun = begun.clone();
            async move {
                begun.send(claim.name_any()).unwrap();
                if is_slow(&claim) {
                    signal.wait().await;
                }
                Action::await_change()
            }
        };
        let queue = futures::stream::iter(names.map(|name| ObjectRef::new(name).within("shop")))
            .chain(futures::stream::pending());
        let stopped = async { drop(stopped.await) };
        let running =
            tokio::spawn(run(1, Slow { concurrency: 2, is_slow }, queue, cache, reconcile, ctx, stopped));
        let mut under_way = Vec::new();
        while under_way.len() < 3 {
            let next = timeout(Duration::from_secs(5), beginnings.recv()).await;
            under_way.push(next.expect("the slow ones are awaited").unwrap());
        }
        under_way.sort();
        assert_eq!(under_way[0], "quick");
        signal.set();
        assert!(beginnings.recv().await.unwrap().starts_with("slow"));
        drop(stop);
        running.await.unwrap();
    }

    fn is_slow(claim: &PersistentVolumeClaim) -> bool {
        claim.name_any().starts_with("slow")
    }

    fn kinds(event: Event<Pruned<PersistentVolumeClaim>>, cached: bool) -> Option<&'static str> {
        let identity = fixtures::identity();
        let narrowed = narrow(event, |claim| ownership::is_claim_of_interest(claim, &identity), |_| cached)?;
        Some(match narrowed {
            Event::Apply(_) => "apply",
            Event::Delete(_) => "delete",
            Event::Init => "init",
            Event::InitApply(_) => "init-apply",
            Event::InitDone => "init-done",
        })
    }

    #[test]
    fn claims_of_other_nodes_are_not_cached() {
        let ours = || Pruned::from(fixtures::claim(json!({})));
        let foreign = || {
            Pruned::from(fixtures::claim(
                json!({"metadata": {"annotations": {"volume.kubernetes.io/selected-node": "node-b"}}}),
            ))
        };
        assert_eq!(kinds(Event::Apply(ours()), false), Some("apply"));
        assert_eq!(kinds(Event::Delete(ours()), true), Some("delete"));
        assert_eq!(kinds(Event::InitApply(ours()), false), Some("init-apply"));
        assert_eq!(kinds(Event::Apply(foreign()), false), None);
        assert_eq!(kinds(Event::Delete(foreign()), false), None);
        assert_eq!(kinds(Event::InitApply(foreign()), true), None);
        assert_eq!(kinds(Event::Apply(foreign()), true), Some("delete"), "the scheduler chose another node");
    }
}
