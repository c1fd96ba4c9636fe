//! Runs the queue of a controller, and watches only the objects of interest.
//!
//! `docs/decisions/0040-changes-from-the-cache.md` gives the reasons.

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
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::api::{
    backoff::Backoff,
    fair_slots::FairSlots,
    pruned::{Prune, Pruned},
    queue_metrics::QueueDepth,
    signals::RetryGeneration,
};

/// A type of Kubernetes object.
pub(crate) trait Object:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
}
impl<K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static> Object for K {}

/// How the objects of a queue are reconciled.
pub(crate) struct Workers<K> {
    /// How many are reconciled concurrently.
    pub(crate) concurrency: u16,
    pub(crate) slow: Slow<K>,
    pub(crate) depth: QueueDepth,
}

/// Objects whose reconciliation can take minutes.
pub(crate) struct Slow<K> {
    /// How many are reconciled concurrently, in addition to the others. Namespaces share them; see [`FairSlots`].
    pub(crate) slots: usize,
    pub(crate) is_slow: fn(&K) -> bool,
}

impl<K> Slow<K> {
    pub(crate) fn none() -> Self {
        Slow { slots: 1, is_slow: |_object| false }
    }
}

/// Reconciles the objects that `queue` names until `stop` completes and the reconciliations in progress have ended. Slow objects have
/// a concurrency of their own, so that the others do not wait for them. An object that is named again while it waits is reconciled
/// once, so the queue is never longer than the cache.
///
/// Each reconciliation is a task of its own, and so is the queue: parsing watch events takes processor time, and no
/// reconciliation should wait for that.
pub(crate) async fn run<K, Ctx, Reconciling>(
    workers: Workers<K>,
    queue: impl Stream<Item = ObjectRef<K>> + Send + 'static,
    cache: Store<K>,
    reconcile: impl Fn(Arc<K>, Arc<Ctx>) -> Reconciling,
    ctx: Arc<Ctx>,
    stop: impl Future<Output = ()> + Send + 'static,
) where
    K: Object,
    Reconciling: Future<Output = Action> + Send + 'static,
{
    let Workers { concurrency, slow, depth } = workers;
    let (named, turns) = mpsc::unbounded_channel();
    let entering = depth.clone();
    // When this task ends, the channel closes and the appliers end.
    let mut naming =
        AbortOnDropHandle::new(tokio::spawn(queue.take_until(Box::pin(stop)).for_each(move |object| {
            entering.entered(&object);
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
    let (reconcile, slots) = (&reconcile, FairSlots::new(slow.slots));
    // The slots, and not the applier, limit the slow ones: the applier knows no namespaces.
    const UNLIMITED: u16 = 0;
    tokio::join!(
        apply(concurrency, turns, cache.clone(), None, reconcile, Arc::clone(&ctx), &depth),
        apply(UNLIMITED, receiver(slow_turns), cache, Some(&slots), reconcile, ctx, &depth),
        async {
            naming.await.ok();
            slots.close();
        },
    );
}

/// Reconciles the objects that `turns` names, until it ends and the reconciliations in progress have ended.
async fn apply<K, Ctx, Reconciling>(
    concurrency: u16,
    turns: impl Stream<Item = ObjectRef<K>>,
    cache: Store<K>,
    slots: Option<&Arc<FairSlots>>,
    reconcile: &impl Fn(Arc<K>, Arc<Ctx>) -> Reconciling,
    ctx: Arc<Ctx>,
    depth: &QueueDepth,
) where
    K: Object,
    Reconciling: Future<Output = Action> + Send + 'static,
{
    let queue = turns.map(|object| Ok::<_, Infallible>(ReconcileRequest::from(object)));
    let known = cache.clone();
    let reconcile = |object: Arc<K>, ctx| {
        let known = &known;
        Box::pin(async move {
            let (object, _slot) = match slots {
                None => (object, None),
                Some(slots) => {
                    let key = ObjectRef::from_obj(&*object);
                    let slot = slots.acquire(key.namespace.clone()).await;
                    // It may have changed while it waited, or be deleted.
                    let (Some(object), Some(slot)) = (known.get(&key), slot) else {
                        depth.left(&key);
                        return Ok(Action::await_change());
                    };
                    (object, Some(slot))
                }
            };
            depth.started(&*object);
            let reconciling = AbortOnDropHandle::new(tokio::spawn(reconcile(object, ctx)));
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
            Err(Error::ObjectNotFound(object)) => {
                depth.left(&object);
                tracing::trace!(%object, "deleted before its turn");
            }
            Err(error) => tracing::error!(%error, "a controller failed"),
        })
        .await;
}

/// A change of the cache of a watch. The cache holds it already.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CacheChange<K> {
    /// The object was created or changed, or belongs to a list that replaced the cache.
    Applied(Arc<K>),
    /// The object was deleted, or has ceased to be of interest.
    Deleted(Arc<K>),
    /// A complete list has replaced the cache: the first one, or one after the API server could not resume the watch. Objects that
    /// were deleted in between are no longer in it. `Applied` of each object of the list follows.
    Listed,
}

/// Watches objects, keeps those of interest in `cache`, and passes on its changes.
///
/// An object that is not of interest any more leaves the cache as if it were deleted. An object that never was of interest is
/// not stored, so memory does not grow with the objects of other nodes.
pub(crate) fn watch<K: Object + Prune>(
    api: Api<Pruned<K>>,
    config: watcher::Config,
    cache: Writer<K>,
    of_interest: impl Fn(&K) -> bool + Send + 'static,
) -> impl Stream<Item = CacheChange<K>> + Send
where
    K::DynamicType: Hash + Eq,
{
    changes(watcher::watcher(api, config).default_backoff(), cache, of_interest)
}

/// As [`watch`], but whenever the value of `selection` changes, another watch with the options of the new value begins with a list of
/// its own. The first one begins once there is a value.
pub(crate) fn watch_selection<K: Object + Prune, S: Copy + PartialEq + Send + Sync + 'static>(
    api: Api<Pruned<K>>,
    selection: watch::Receiver<Option<S>>,
    config: impl Fn(S) -> watcher::Config + Send + 'static,
    cache: Writer<K>,
    of_interest: impl Fn(&K) -> bool + Send + 'static,
) -> impl Stream<Item = CacheChange<K>> + Send
where
    K::DynamicType: Hash + Eq,
{
    let selections = futures::stream::unfold(selection, |mut selection| async move {
        let selected = (*selection.wait_for(Option::is_some).await.ok()?)?;
        Some(((selected, selection.clone()), selection))
    });
    let events = selections.flat_map(move |(selected, mut selection)| {
        let changed = async move {
            let other = selection.wait_for(|next| next.is_some_and(|next| next != selected)).await.is_ok();
            if !other {
                // No other value follows.
                std::future::pending::<()>().await;
            }
        };
        watcher::watcher(api.clone(), config(selected)).default_backoff().take_until(Box::pin(changed))
    });
    changes(events, cache, of_interest)
}

fn changes<K: Object>(
    events: impl Stream<Item = watcher::Result<Event<Pruned<K>>>> + Send,
    mut cache: Writer<K>,
    of_interest: impl Fn(&K) -> bool + Send + 'static,
) -> impl Stream<Item = CacheChange<K>> + Send
where
    K::DynamicType: Hash + Eq,
{
    let cached = cache.as_reader();
    let changes = events.map(move |event| {
        let event = match event {
            Ok(event) => narrow(event, &of_interest, |object| cached.get(object).is_some()),
            Err(error) => {
                tracing::warn!(%error, kind = %K::kind(&()), "a watch failed; it restarts with back-off");
                None
            }
        };
        futures::stream::iter(event.map(|event| apply_to(&mut cache, event)).unwrap_or_default())
    });
    changes.flatten()
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

/// Applies an event to the cache and returns what that changed.
///
/// The objects of a list enter the cache together with the last one. Reconciled earlier, they would be reconciled as they were
/// before the list, and an object that changed while the watch was interrupted would not be reconciled as it is now.
fn apply_to<K: Object>(cache: &mut Writer<K>, event: Event<Pruned<K>>) -> Vec<CacheChange<K>>
where
    K::DynamicType: Hash + Eq,
{
    let event = map(event, Pruned::into_inner);
    cache.apply_watcher_event(&event);
    let cached = cache.as_reader();
    match event {
        Event::Apply(object) => {
            cached.get(&ObjectRef::from_obj(&object)).map(CacheChange::Applied).into_iter().collect()
        }
        Event::Delete(object) => vec![CacheChange::Deleted(Arc::new(object))],
        Event::Init | Event::InitApply(_) => vec![],
        Event::InitDone => std::iter::once(CacheChange::Listed)
            .chain(cached.state().into_iter().map(CacheChange::Applied))
            .collect(),
    }
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
    use crate::{
        api::{queue_metrics::QueueMetrics, signals::SyncSignal},
        objects::ownership,
        testing::fixtures,
    };

    #[tokio::test]
    async fn slow_objects_do_not_delay_the_others() {
        let (cache, mut writer) = reflector::store();
        let claims = [
            ("shop", "slow-1"),
            ("shop", "slow-2"),
            ("shop", "slow-3"),
            ("shop", "slow-4"),
            ("shop", "slow-5"),
            ("shop", "quick"),
            ("bank", "slow-of-bank"),
        ];
        writer.apply_watcher_event(&Event::Init);
        for (namespace, name) in claims {
            let claim = fixtures::claim(json!({"metadata": {"namespace": namespace, "name": name}}));
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
        let queue =
            futures::stream::iter(claims.map(|(namespace, name)| ObjectRef::new(name).within(namespace)))
                .chain(futures::stream::pending());
        let stopped = async { drop(stopped.await) };
        let depth = QueueMetrics::default().queue("claims");
        let workers = Workers { concurrency: 1, slow: Slow { slots: 4, is_slow }, depth };
        let running = tokio::spawn(run(workers, queue, cache, reconcile, ctx, stopped));
        let mut started = Vec::new();
        while started.len() < 4 {
            let next = timeout(Duration::from_secs(60), beginnings.recv()).await;
            started.push(next.expect("four reconciliations start").unwrap());
        }
        assert!(["quick", "slow-of-bank"].iter().all(|name| started.iter().any(|started| started == name)));
        signal.set();
        assert!(beginnings.recv().await.unwrap().starts_with("slow"));
        drop(stop);
        running.await.unwrap();
    }

    /// The API server cannot resume a watch after its restart, so the watch lists all objects again.
    #[tokio::test]
    async fn each_change_is_in_the_cache_when_it_is_passed_on() {
        let claim = |name: &str, size: &str| {
            let change = json!({
                "metadata": {"name": name}, "spec": {"resources": {"requests": {"storage": size}}},
            });
            fixtures::claim(change)
        };
        let lean = |name, size| Pruned::from(claim(name, size));
        let events = [
            Event::Init,
            Event::InitApply(lean("a", "1Mi")),
            Event::InitApply(lean("b", "1Mi")),
            Event::InitDone,
            Event::Apply(lean("b", "2Mi")),
            Event::Init,
            Event::InitApply(lean("b", "3Mi")),
            Event::InitApply(lean("c", "1Mi")),
            Event::InitDone,
            Event::Delete(lean("c", "1Mi")),
        ];
        let (cache, writer) = reflector::store();
        let mut changes =
            Box::pin(changes(futures::stream::iter(events.map(watcher::Result::Ok)), writer, |_claim| true));
        let mut seen = Vec::new();
        while let Some(change) = changes.next().await {
            match &change {
                CacheChange::Applied(object) => {
                    assert_eq!(cache.get(&ObjectRef::from_obj(&**object)).as_ref(), Some(object));
                }
                CacheChange::Deleted(object) => assert_eq!(cache.get(&ObjectRef::from_obj(&**object)), None),
                CacheChange::Listed => {}
            }
            seen.push(change);
        }
        let applied = |name, size| CacheChange::Applied(Arc::new(claim(name, size)));
        let mut first = seen[1..3].to_vec();
        let mut second = seen[5..7].to_vec();
        let by_name = |change: &CacheChange<PersistentVolumeClaim>| format!("{change:?}");
        first.sort_by_key(by_name);
        second.sort_by_key(by_name);
        assert_eq!(first, [applied("a", "1Mi"), applied("b", "1Mi")]);
        assert_eq!(
            (&seen[0], &seen[3], &seen[4]),
            (&CacheChange::Listed, &applied("b", "2Mi"), &CacheChange::Listed)
        );
        assert_eq!(second, [applied("b", "3Mi"), applied("c", "1Mi")]);
        assert_eq!(seen[7..], [CacheChange::Deleted(Arc::new(claim("c", "1Mi")))]);
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
