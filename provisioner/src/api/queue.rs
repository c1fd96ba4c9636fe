//! Runs the queue of a controller, and watches only the objects of interest.
//!
//! kube's `Controller` has one queue for all objects, so slow ones delay the others, and its predicates drop an event where an object that
//! has ceased to be of interest has to leave the cache.
//!
//! `docs/decisions/0040-changes-from-the-cache.md` gives the reasons.

use std::convert::Infallible;
use std::fmt::Debug;
use std::hash::Hash;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use kube::runtime::WatchStreamExt;
use kube::runtime::controller::{Action, Config, Error, ReconcileRequest, applier};
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{SetOnce, mpsc, watch};
use tokio::task::JoinError;
use tokio::time::sleep;
use tokio_stream::wrappers::{UnboundedReceiverStream, WatchStream};
use tokio_util::task::{AbortOnDropHandle, JoinMap};

use crate::api::fair_queue::FairQueue;
use crate::api::pruned::{Prune, Pruned};
use crate::api::queue_metrics::QueueDepth;

/// A type of Kubernetes object.
pub(crate) trait KubernetesObject:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
}
impl<K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static>
    KubernetesObject for K
{
}

/// When an object is reconciled again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// When it or something related to it changes.
    Change,
    /// After this time, or at a change before that.
    After(Duration),
}

/// How the objects of a queue are reconciled.
pub(crate) struct Workers<K> {
    /// How many are reconciled concurrently.
    pub(crate) concurrency: u16,
    pub(crate) slow: Slow<K>,
    pub(crate) depth: QueueDepth,
}

/// Objects whose reconciliation can take minutes.
pub(crate) struct Slow<K> {
    /// How many are reconciled concurrently, in addition to the others. Namespaces share them; see [`FairQueue`].
    pub(crate) slots: usize,
    pub(crate) is_slow: Box<dyn Fn(&K) -> bool + Send + Sync>,
}

impl<K> Slow<K> {
    pub(crate) fn none() -> Self {
        Slow { slots: 0, is_slow: Box::new(|_object| false) }
    }
}

/// Reconciles the objects that `queue` names until `stop` completes and the reconciliations in progress have ended. Slow objects have
/// a queue of their own, so that the others do not wait for them. An object that is named again while it waits is reconciled
/// once.
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
    K: KubernetesObject,
    Reconciling: Future<Output = Next> + Send + 'static,
{
    let Workers { concurrency, slow: Slow { slots, is_slow }, depth } = workers;
    let (named, turns) = mpsc::unbounded_channel();
    let entering = depth.clone();
    // When this task ends, its channel closes and the reconciliations end.
    let naming =
        AbortOnDropHandle::new(tokio::spawn(queue.take_until(Box::pin(stop)).for_each(move |object| {
            entering.entered(&object);
            named.send(object).ok();
            std::future::ready(())
        })));
    let (named_slow, slow_turns) = mpsc::unbounded_channel();
    let start = |object: Arc<K>| {
        depth.started(&*object);
        reconcile(object, Arc::clone(&ctx))
    };
    let pass_on = |object: &K| {
        let slow = is_slow(object);
        if slow {
            named_slow.send(ObjectRef::from_obj(object)).ok();
        }
        slow
    };
    tokio::join!(
        reconcile_fast(
            concurrency,
            UnboundedReceiverStream::new(turns),
            cache.clone(),
            &pass_on,
            &start,
            &depth
        ),
        reconcile_slow(slots, slow_turns, naming, &cache, &start, &depth),
    );
}

/// Reconciles the objects that `turns` names but for those that `pass_on` takes, until it ends and the reconciliations in progress have
/// ended.
async fn reconcile_fast<K: KubernetesObject, Reconciling: Future<Output = Next> + Send + 'static>(
    concurrency: u16,
    turns: impl Stream<Item = ObjectRef<K>>,
    cache: Store<K>,
    pass_on: &impl Fn(&K) -> bool,
    start: &impl Fn(Arc<K>) -> Reconciling,
    depth: &QueueDepth,
) {
    let queue = turns.map(|object| Ok::<_, Infallible>(ReconcileRequest::from(object)));
    let reconcile = |object: Arc<K>, _ctx| {
        Box::pin(async move {
            if pass_on(&object) {
                return Ok::<_, Infallible>(Action::await_change());
            }
            let reconciling = AbortOnDropHandle::new(tokio::spawn(start(object)));
            Ok(match reconciling.await.unwrap_or_else(repeat_panic) {
                Next::Change => Action::await_change(),
                Next::After(wait) => Action::requeue(wait),
            })
        })
    };
    let never = |_object: Arc<K>, never: &Infallible, _ctx: Arc<()>| match *never {};
    let config = Config::default().concurrency(concurrency);
    let results = applier(reconcile, never, Arc::new(()), cache, queue, config);
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

/// Reconciles the objects that `turns` names, as the queue grants them slots, until `naming` and the reconciliations in progress have
/// ended. An object that waits for a slot takes no more memory than its name, and one that waits for its next attempt has one task.
async fn reconcile_slow<K: KubernetesObject, Reconciling: Future<Output = Next> + Send + 'static>(
    slots: usize,
    mut turns: mpsc::UnboundedReceiver<ObjectRef<K>>,
    mut naming: AbortOnDropHandle<()>,
    cache: &Store<K>,
    start: &impl Fn(Arc<K>) -> Reconciling,
    depth: &QueueDepth,
) {
    let mut queue = FairQueue::new(slots);
    let (mut running, mut delayed) = (JoinMap::new(), JoinMap::new());
    let mut open = true;
    while open || !running.is_empty() {
        while open && let Some(key) = queue.next() {
            match cache.get(&key) {
                Some(object) => running.spawn(key, start(object)),
                None => {
                    depth.left(&key);
                    queue.end(&key);
                }
            }
        }
        tokio::select! {
            _ended = &mut naming, if open => open = false,
            Some(key) = turns.recv(), if open => queue.push(key),
            Some((key, due)) = delayed.join_next(), if open => {
                due.unwrap_or_else(repeat_panic);
                queue.push(key);
            }
            Some((key, ended)) = running.join_next() => {
                queue.end(&key);
                if let Next::After(wait) = ended.unwrap_or_else(repeat_panic) {
                    // A changed claim is tried before its wait ends. If it fails again, the new wait replaces that one.
                    delayed.spawn(key, sleep(wait));
                }
            }
        }
        // A tenant can create and delete claims while its copies run.
        if queue.len() > 2 * cache.len() + PRUNE_ABOVE {
            queue.retain(|key| {
                cache.get(key).is_some() || {
                    depth.left(key);
                    false
                }
            });
        }
    }
}

/// The number of deleted objects that may wait for a slot.
const PRUNE_ABOVE: usize = 64;

/// Continues the panic of a task that is never cancelled.
fn repeat_panic<T>(error: JoinError) -> T {
    resume_unwind(error.into_panic())
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
pub(crate) fn watch<K: KubernetesObject + Prune>(
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

/// Keeps the objects of interest of a watch, as [`watch`] does.
pub(crate) fn changes<K: KubernetesObject>(
    events: impl Stream<Item = watcher::Result<Event<Pruned<K>>>> + Send,
    mut cache: Writer<K>,
    of_interest: impl Fn(&K) -> bool + Send + 'static,
) -> impl Stream<Item = CacheChange<K>> + Send
where
    K::DynamicType: Hash + Eq,
{
    let changes = events.map(move |event| {
        futures::stream::iter(match event {
            Ok(event) => apply_to(&mut cache, event, &of_interest),
            Err(error) => {
                tracing::warn!(%error, kind = %K::kind(&()), "a watch failed; it restarts with back-off");
                vec![]
            }
        })
    });
    changes.flatten()
}

/// Applies an event to the cache and returns what that changed.
///
/// The objects of a list enter the cache together with the last one. Reconciled earlier, they would be reconciled as they were
/// before the list, and an object that changed while the watch was interrupted would not be reconciled as it is now.
fn apply_to<K: KubernetesObject>(
    cache: &mut Writer<K>,
    event: Event<Pruned<K>>,
    of_interest: impl Fn(&K) -> bool,
) -> Vec<CacheChange<K>>
where
    K::DynamicType: Hash + Eq,
{
    let cached = cache.as_reader();
    let event = match event {
        Event::Apply(object) if of_interest(&object) => Event::Apply(object.into_inner()),
        Event::Delete(object) if of_interest(&object) => Event::Delete(object.into_inner()),
        Event::Apply(object) | Event::Delete(object)
            if cached.get(&ObjectRef::from_obj(&*object)).is_some() =>
        {
            Event::Delete(object.into_inner())
        }
        Event::InitApply(object) if of_interest(&object) => Event::InitApply(object.into_inner()),
        Event::Apply(_) | Event::Delete(_) | Event::InitApply(_) => return vec![],
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
    };
    cache.apply_watcher_event(&event);
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

/// Lets the cache of a watch follow its changes. Sets `synced` after the first list, and calls `changed` for each change. (The caches' own
/// `wait_until_ready` wakes only the task that began to wait last.)
pub(crate) async fn follow<K>(
    changes: impl Stream<Item = CacheChange<K>>,
    synced: &SetOnce<()>,
    changed: impl Fn(),
) {
    let follow = |change| {
        if matches!(change, CacheChange::Listed) {
            synced.set(()).ok();
        }
        changed();
        std::future::ready(())
    };
    changes.for_each(follow).await;
}

/// Returns the keys of all failed attempts, which `failed` returns, each time the retry generation increases.
pub(crate) fn requeue_failed<K: Send + 'static>(
    generation: watch::Receiver<u64>,
    failed: impl Fn() -> Vec<K> + Send + 'static,
) -> impl Stream<Item = K> + Send {
    WatchStream::from_changes(generation).flat_map(move |_| futures::stream::iter(failed()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use kube::ResourceExt;
    use kube::runtime::reflector;
    use serde_json::json;
    use tokio::runtime::Handle;
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;
    use crate::api::queue_metrics::QueueMetrics;
    use crate::objects::ownership;
    use crate::testing::{fixtures, mock_api_server};

    #[tokio::test]
    async fn slow_objects_delay_no_others() {
        let claims = [
            ("shop", "slow-1"),
            ("shop", "slow-2"),
            ("shop", "slow-3"),
            ("shop", "slow-4"),
            ("shop", "slow-5"),
            ("shop", "quick"),
            ("bank", "slow-of-bank"),
        ];
        let claim =
            |(namespace, name)| fixtures::claim(json!({"metadata": {"namespace": namespace, "name": name}}));
        let (cache, _writer) = mock_api_server::cache(claims.map(claim).into());
        let (begun, mut beginnings) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let signal = Arc::new(SetOnce::new());
        let ctx = Arc::clone(&signal);
        let reconcile = move |claim: Arc<PersistentVolumeClaim>, signal: Arc<SetOnce<()>>| {
            let begun = begun.clone();
            async move {
                begun.send(claim.name_any()).unwrap();
                if is_slow(&claim) {
                    signal.wait().await;
                }
                Next::Change
            }
        };
        let queue =
            futures::stream::iter(claims.map(|(namespace, name)| ObjectRef::new(name).within(namespace)))
                .chain(futures::stream::pending());
        let stopped = async { drop(stopped.await) };
        let depth = QueueMetrics::default().queue("claims");
        let slow = Slow { slots: 4, is_slow: Box::new(is_slow) };
        let workers = Workers { concurrency: 1, slow, depth };
        let running = tokio::spawn(run(workers, queue, cache, reconcile, ctx, stopped));
        let mut started = Vec::new();
        while started.len() < 4 {
            let next = timeout(Duration::from_secs(60), beginnings.recv()).await;
            started.push(next.expect("four reconciliations start").unwrap());
        }
        assert!(["quick", "slow-of-bank"].iter().all(|name| started.iter().any(|started| started == name)));
        signal.set(()).unwrap();
        assert!(beginnings.recv().await.unwrap().starts_with("slow"));
        drop(stop);
        running.await.unwrap();
    }

    #[tokio::test]
    async fn repeatedly_delayed_object_waits_once() {
        let claim = fixtures::claim(json!({"metadata": {"name": "slow"}}));
        let key = ObjectRef::from_obj(&claim);
        let (cache, _writer) = mock_api_server::cache(vec![claim]);
        let (named, queue) = mpsc::unbounded_channel();
        let (begun, mut beginnings) = mpsc::unbounded_channel();
        let reconcile = move |_claim, begun: Arc<mpsc::UnboundedSender<()>>| async move {
            begun.send(()).unwrap();
            Next::After(Duration::from_secs(3600))
        };
        let slow = Slow { slots: 2, is_slow: Box::new(is_slow) };
        let workers = Workers { concurrency: 1, slow, depth: QueueMetrics::default().queue("claims") };
        let queue = UnboundedReceiverStream::new(queue);
        let never = futures::future::pending();
        tokio::spawn(run(workers, queue, cache, reconcile, Arc::new(begun), never));
        for _ in 0..100 {
            named.send(key.clone()).unwrap();
            timeout(Duration::from_secs(60), beginnings.recv()).await.expect("it is reconciled").unwrap();
        }
        let tasks = Handle::current().metrics().num_alive_tasks();
        assert!(tasks < 10, "{tasks} tasks");
    }

    /// The API server cannot resume a watch after its restart, so the watch lists all objects again.
    #[tokio::test]
    async fn changes_are_cached_before_passed_on() {
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

    #[tokio::test]
    async fn other_nodes_claims_are_not_cached() {
        let on = |name: &str, node: &str| {
            let annotations = json!({ownership::SELECTED_NODE: node});
            fixtures::claim(json!({"metadata": {"name": name, "annotations": annotations}}))
        };
        let (ours, moved, foreign) = (on("a", "node-a"), on("a", "node-b"), on("b", "node-b"));
        let lean = |claim: &PersistentVolumeClaim| Pruned::from(claim.clone());
        let events = [
            Event::Init,
            Event::InitApply(lean(&ours)),
            Event::InitApply(lean(&foreign)),
            Event::InitDone,
            Event::Apply(lean(&foreign)),
            Event::Delete(lean(&foreign)),
            // The scheduler chose another node.
            Event::Apply(lean(&moved)),
            Event::Apply(lean(&ours)),
            Event::Delete(lean(&ours)),
        ];
        let events = futures::stream::iter(events.map(watcher::Result::Ok));
        let (_cache, writer) = reflector::store();
        let identity = fixtures::identity();
        let of_interest = move |claim: &_| ownership::is_claim_of_interest(claim, &identity);
        let seen: Vec<_> = changes(events, writer, of_interest).collect().await;
        let (ours, moved) = (Arc::new(ours), Arc::new(moved));
        let expected = [
            CacheChange::Listed,
            CacheChange::Applied(Arc::clone(&ours)),
            CacheChange::Deleted(moved),
            CacheChange::Applied(Arc::clone(&ours)),
            CacheChange::Deleted(ours),
        ];
        assert_eq!(seen, expected);
    }
}
