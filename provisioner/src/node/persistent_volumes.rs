//! The controller of this node's PersistentVolumes.

use std::sync::Arc;
use std::time::Instant;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use tokio::sync::mpsc;

use crate::api::events::Reason;
use crate::api::queue::{self, CacheChange, Next, Slow, Workers};
use crate::error::Error;
use crate::node::context::{Context, RetryKey};
use crate::node::delete;
use crate::objects::ownership;

/// PersistentVolumes reconciled concurrently: fewer than claims, for which users wait. During a bulk deletion a new claim should get
/// its volume as fast as otherwise.
const CONCURRENCY: u16 = 4;

/// Runs until `stop` completes and the reconciles in progress have ended. Sends the claims of changed PersistentVolumes to
/// `related`.
pub(crate) async fn run(
    ctx: Arc<Context>,
    cache: Writer<PersistentVolume>,
    related: mpsc::UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let identity = ctx.cluster.identity.clone();
    let selector = identity.node_selector(identity.node());
    let of_interest = move |volume: &PersistentVolume| ownership::is_our_volume(volume, &identity);
    let config = watcher::Config::default().labels(&selector);
    let changes = queue::watch(Api::all(ctx.cluster.client.clone()), config, cache, of_interest);
    let observer = Arc::clone(&ctx);
    let touched = changes.filter_map(move |change| std::future::ready(observe(change, &observer, &related)));
    let of_retries = Arc::clone(&ctx);
    let failed = move || of_retries.volumes.backoff.keys();
    let retried = queue::requeue_failed(ctx.retry_generation.subscribe(), failed);
    let queue = stream::select(touched, retried);
    let depth = ctx.queues.queue("volumes");
    let workers = Workers { concurrency: CONCURRENCY, slow: Slow::none(), depth };
    queue::run(workers, queue, ctx.volumes.cache.clone(), reconcile, ctx, stop).await;
}

/// Handles a change of the cache. Returns the PersistentVolume to reconcile, if any, and sends its claim to `related`.
fn observe(
    change: CacheChange<PersistentVolume>,
    ctx: &Context,
    related: &mpsc::UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
) -> Option<ObjectRef<PersistentVolume>> {
    let claim = match &change {
        CacheChange::Applied(volume) | CacheChange::Deleted(volume) => claim_of(volume),
        CacheChange::Listed => None,
    };
    let touched = match change {
        CacheChange::Applied(volume) => Some(ObjectRef::from_obj(&*volume)),
        CacheChange::Deleted(volume) => {
            let key = ObjectRef::from_obj(&*volume);
            ctx.volumes.writes.forget(&key);
            ctx.volumes.backoff.clear(&key);
            ctx.volumes.conflicts.clear(&key);
            None
        }
        CacheChange::Listed => {
            ctx.volumes.listed();
            None
        }
    };
    if let Some(claim) = claim {
        // The controller no longer listens during shutdown.
        drop(related.send(claim));
    }
    touched
}

fn claim_of(volume: &PersistentVolume) -> Option<ObjectRef<PersistentVolumeClaim>> {
    let reference = volume.spec.as_ref()?.claim_ref.as_ref()?;
    Some(ObjectRef::new(reference.name.as_deref()?).within(reference.namespace.as_deref()?))
}

async fn reconcile(cached: Arc<PersistentVolume>, ctx: Arc<Context>) -> Next {
    ctx.synced().await;
    let volume = ctx.volumes.writes.newest(cached);
    let key = ObjectRef::from_obj(&*volume);
    let retry_key = RetryKey {
        uid: volume.uid(),
        volume_version: volume.resource_version(),
        retry_generation: Some(*ctx.retry_generation.borrow()),
        ..Default::default()
    };
    if let Some(wait) = ctx.volumes.remaining(&key, &retry_key) {
        return Next::After(wait);
    }
    let attempted = attempt(&volume, &ctx).await;
    if !attempted.as_ref().is_err_and(Error::is_conflict) {
        ctx.volumes.conflicts.clear(&key);
    }
    match attempted {
        Ok(()) => {
            ctx.volumes.backoff.clear(&key);
            Next::Change
        }
        Err(error) if error.is_conflict() => {
            tracing::debug!(volume = %key, %error, "the PersistentVolume changed in the meantime, or another task works on its volume; it is reconciled again");
            Next::After(ctx.volumes.conflicted(key))
        }
        Err(error) => {
            let wait = ctx.volumes.failed(key, retry_key, error.awaits_storage());
            tracing::debug!(
                reason = error.reason(),
                ?wait,
                "could not reconcile a PersistentVolume; the next attempt follows after the wait"
            );
            ctx.cluster.events.publish(&*volume, Reason::VolumeFailedDelete, error.to_string());
            Next::After(wait)
        }
    }
}

async fn attempt(volume: &PersistentVolume, ctx: &Context) -> Result<(), Error> {
    let begun = Instant::now();
    let plan = delete::plan(volume, &ctx.cluster.identity);
    let deletes = matches!(plan, Ok(delete::DeletionPlan::Delete(_)));
    let outcome = match plan {
        Ok(plan) => delete::apply(volume, plan, ctx).await,
        Err(error) => Err(error),
    };
    if deletes || outcome.is_err() {
        ctx.operations.ended("delete", begun, outcome.as_ref().copied());
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::Method;
    use k8s_openapi::api::core::v1::PersistentVolume;
    use loopfs::ErrorKind;
    use loopfs::volume_store::VolumeId;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::api::backoff;
    use crate::testing::mock_api_server::{
        Caches, ExpectedRequest, TestContext, expect, labelled, unlabelled,
    };
    use crate::testing::{fake_store, fixtures};

    const VOLUME: &str = "/api/v1/persistentvolumes/pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";

    fn released(change: Value) -> PersistentVolume {
        let mut released = json!({"status": {"phase": "Released"}});
        fixtures::merge_keeping_nulls(&mut released, change);
        fixtures::volume(released)
    }

    fn marks() -> ExpectedRequest {
        marks_version("200")
    }

    fn marks_version(version: &str) -> ExpectedRequest {
        let preconditions = json!({"preconditions": {"uid": "volume-uid", "resourceVersion": version}});
        expect(Method::DELETE, VOLUME, preconditions)
            .respond(released(json!({"metadata": {"resourceVersion": "201"}})))
    }

    fn removes_finalizer() -> ExpectedRequest {
        let patch = json!({"metadata": {
            "uid": "volume-uid",
            "$deleteFromPrimitiveList/finalizers": ["external-provisioner.volume.kubernetes.io/finalizer"],
        }});
        expect(Method::PATCH, VOLUME, patch)
            .respond(released(json!({"metadata": {"resourceVersion": "202"}})))
    }

    /// Returns a context whose store has the volume.
    fn test_context(requests: Vec<ExpectedRequest>) -> TestContext {
        context_with(Caches::default(), requests)
    }

    fn context_with(caches: Caches, requests: Vec<ExpectedRequest>) -> TestContext {
        let test_context = TestContext::with(caches, requests);
        test_context.volumes.add(fixtures::VOLUME);
        test_context
    }

    async fn reconciled(test_context: &TestContext, volume: PersistentVolume) -> Next {
        reconcile(Arc::new(volume), Arc::clone(&test_context.ctx)).await
    }

    fn marked(change: Value) -> PersistentVolume {
        let mut marked = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        fixtures::merge_keeping_nulls(&mut marked, change);
        released(marked)
    }

    fn available() -> PersistentVolume {
        marked(json!({"status": {"phase": "Available"}}))
    }

    fn on_a_missing_disk() -> PersistentVolume {
        let uuid = json!({"csi.loopfs.dev/filesystem-uuid": "00000000-0000-4000-8000-000000000000"});
        marked(json!({"spec": {"csi": {"volumeAttributes": uuid}}}))
    }

    /// Returns the requests of a deletion: the data is deleted between two writes.
    fn deletes() -> Vec<ExpectedRequest> {
        vec![unlabelled(&[]), marks(), removes_finalizer()]
    }

    /// Returns the requests of a deletion of a PersistentVolume that has changed in the meantime.
    fn conflicts() -> Vec<ExpectedRequest> {
        vec![unlabelled(&[]), marks().refuse(409, "Conflict")]
    }

    fn adds_finalizer() -> Vec<ExpectedRequest> {
        let hold = json!({"metadata": {
            "uid": "volume-uid", "finalizers": ["external-provisioner.volume.kubernetes.io/finalizer"],
        }});
        vec![expect(Method::PATCH, VOLUME, hold).respond(fixtures::volume(json!({})))]
    }

    const CONFLICT: Next = Next::After(backoff::CONFLICT.first);

    #[rstest]
    #[case::released(released(json!({})), deletes(), Next::Change, 0, &["VolumeDeleted"])]
    #[case::released_and_changed(released(json!({})), conflicts(), CONFLICT, 1, &[])]
    // A crash followed the mark.
    #[case::marked(marked(json!({})), deletes(), Next::Change, 0, &["VolumeDeleted"])]
    #[case::marked_and_changed(marked(json!({})), conflicts(), CONFLICT, 1, &[])]
    #[case::available(available(), deletes(), Next::Change, 0, &["VolumeDeleted"])]
    #[case::available_and_just_bound(available(), conflicts(), CONFLICT, 1, &[])]
    // A volume of the same name on this disk is another.
    #[case::on_a_missing_disk(on_a_missing_disk(), vec![unlabelled(&[]), marks()], Next::After(backoff::FAILURE.first), 1, &["VolumeFailedDelete"])]
    #[case::to_be_retained(released(json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}})), vec![removes_finalizer()], Next::Change, 1, &[])]
    #[case::to_be_deleted_later(fixtures::volume(json!({"metadata": {"finalizers": ["kubernetes.io/pv-protection"]}})), adds_finalizer(), Next::Change, 1, &[])]
    #[tokio::test]
    async fn data_is_deleted_only_if_discarded(
        #[case] volume: PersistentVolume,
        #[case] requests: Vec<ExpectedRequest>,
        #[case] next: Next,
        #[case] left: usize,
        #[case] events: &[&str],
    ) {
        let test_context = test_context(requests);
        assert_eq!(reconciled(&test_context, volume).await, next);
        assert_eq!(test_context.volumes.state().volumes.len(), left);
        assert_eq!(test_context.finish().await, events);
    }

    /// Otherwise the claim's reconcile could create the volume again and use the PersistentVolume that is being deleted.
    #[tokio::test]
    async fn volume_is_locked_until_finalizer_removal() {
        let (removes_finalizer, paused) = removes_finalizer().pause();
        let test_context = test_context(vec![unlabelled(&[]), marks(), removes_finalizer]);
        let reconciling =
            tokio::spawn(reconcile(Arc::new(released(json!({}))), Arc::clone(&test_context.ctx)));
        paused.requested.await.unwrap();
        let id = VolumeId::parse(fixtures::VOLUME).unwrap();
        assert!(test_context.volumes.state().volumes.is_empty());
        assert!(test_context.ctx.in_flight.enter(&id).is_none());
        paused.respond.send(()).unwrap();
        assert_eq!(reconciling.await.unwrap(), Next::Change);
        assert!(test_context.ctx.in_flight.enter(&id).is_some());
        test_context.finish().await;
    }

    #[tokio::test]
    async fn deletion_continues_after_a_crash() {
        let test_context =
            test_context(vec![unlabelled(&[]), marks(), removes_finalizer().refuse(404, "NotFound")]);
        test_context.volumes.state().volumes.clear();
        let marked = marked(json!({}));
        assert_eq!(reconciled(&test_context, marked).await, Next::Change);
        assert_eq!(test_context.finish().await, [""; 0]);
    }

    /// Returns another PersistentVolume with the handle of [`released`].
    fn second(change: Value) -> PersistentVolume {
        let mut second = json!({"metadata": {"name": "second", "uid": "second-uid"}});
        fixtures::merge_keeping_nulls(&mut second, change);
        fixtures::volume(second)
    }

    #[rstest]
    #[case::bound(json!({}))]
    #[case::available(json!({"status": {"phase": "Available"}}))]
    #[case::bound_and_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))]
    #[case::retained(json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}))]
    #[tokio::test]
    async fn data_needed_by_another_is_kept(#[case] change: Value, #[values(true, false)] is_labelled: bool) {
        let mut labels = change;
        if !is_labelled {
            fixtures::merge_keeping_nulls(&mut labels, json!({"metadata": {"labels": null}}));
        }
        let second = second(labels);
        let (caches, requests) = if is_labelled {
            (Caches { volumes: vec![second], ..Caches::default() }, vec![])
        } else {
            (Caches::default(), vec![unlabelled(&[second])])
        };
        let test_context = context_with(caches, requests);
        let action = reconciled(&test_context, released(json!({}))).await;
        assert_eq!(action, Next::After(Duration::from_secs(1)));
        assert_eq!(test_context.volumes.state().volumes.len(), 1);
        assert_eq!(test_context.finish().await, ["VolumeFailedDelete"]);
    }

    #[rstest]
    #[case::released(json!({"status": {"phase": "Released"}}))]
    #[case::of_another_volume(json!({"spec": {"csi": {"volumeHandle": "pvc-2"}}}))]
    #[case::of_another_driver(json!({"spec": {"csi": {"driver": "csi.other.dev"}}}))]
    #[tokio::test]
    async fn discarded_second_persistent_volume_keeps_nothing(#[case] change: Value) {
        let caches =
            Caches { volumes: vec![released(json!({})), second(change.clone())], ..Caches::default() };
        let test_context =
            context_with(caches, vec![unlabelled(&[second(change)]), marks(), removes_finalizer()]);
        assert_eq!(reconciled(&test_context, released(json!({}))).await, Next::Change);
        assert!(test_context.volumes.state().volumes.is_empty());
        test_context.finish().await;
    }

    #[tokio::test]
    async fn proxy_404_proves_no_finalizer_removal() {
        let test_context = test_context(vec![
            unlabelled(&[]),
            marks(),
            removes_finalizer().refuse_by_proxy(404),
            unlabelled(&[]),
            labelled(),
            marks_version("201"),
            removes_finalizer(),
        ]);
        let first = marked(json!({}));
        assert_eq!(reconciled(&test_context, first).await, Next::After(Duration::from_secs(1)));
        // A change of the PersistentVolume ends the back-off.
        let second = marked(json!({"metadata": {"resourceVersion": "201"}}));
        assert_eq!(reconciled(&test_context, second).await, Next::Change);
        assert_eq!(test_context.finish().await, ["VolumeDeleted", "VolumeFailedDelete"]);
    }

    /// Otherwise a claim whose PersistentVolume was deleted before it was bound would get no other.
    #[rstest]
    #[case::changed(CacheChange::Applied(Arc::new(fixtures::volume(json!({})))))]
    #[case::deleted(CacheChange::Deleted(Arc::new(fixtures::volume(json!({})))))]
    #[tokio::test]
    async fn claim_of_volume_is_requeued(#[case] change: CacheChange<PersistentVolume>) {
        let test_context = test_context(vec![]);
        let (related, mut claims) = mpsc::unbounded_channel();
        observe(change, &test_context.ctx, &related);
        assert_eq!(claims.try_recv(), Ok(ObjectRef::new("data").within("shop")));
        test_context.finish().await;
    }

    #[tokio::test]
    async fn removed_finalizer_is_not_added_again() {
        let marked = marked(json!({"metadata": {"resourceVersion": "201"}}));
        let mut released = marked.clone();
        released.metadata.finalizers = None;
        let caches = Caches { volumes: vec![marked.clone()], ..Caches::default() };
        let requests = vec![unlabelled(&[]), marks_version("201"), removes_finalizer().respond(released)];
        let test_context = context_with(caches, requests);
        for _ in 0..2 {
            assert_eq!(reconciled(&test_context, marked.clone()).await, Next::Change);
        }
        assert_eq!(test_context.finish().await, ["VolumeDeleted"]);
    }

    #[tokio::test]
    async fn uncached_persistent_volume_is_not_stored() {
        let test_context = test_context(vec![unlabelled(&[]), marks(), removes_finalizer()]);
        let marked = marked(json!({}));
        reconciled(&test_context, marked.clone()).await;
        assert_eq!(test_context.ctx.volumes.writes.get(&ObjectRef::from_obj(&marked)), None);
        test_context.finish().await;
    }

    #[tokio::test(start_paused = true)]
    async fn volume_in_use_is_reported() {
        let test_context = test_context(vec![unlabelled(&[]), marks()]);
        test_context.volumes.state().busy = true;
        assert_eq!(reconciled(&test_context, released(json!({}))).await, Next::After(Duration::from_secs(1)));
        // Freed space does not end the use.
        test_context.ctx.bump_retry_generation();
        assert!(matches!(reconciled(&test_context, released(json!({}))).await, Next::After(_)));
        assert_eq!(test_context.volumes.state().volumes.len(), 1);
        assert_eq!(test_context.finish().await, ["VolumeFailedDelete"]);
    }

    #[tokio::test]
    async fn unavailable_store_marks_no_persistent_volume() {
        let test_context = test_context(vec![]);
        test_context.break_with(fake_store::error(ErrorKind::NotMounted, "mount it"));
        assert_eq!(reconciled(&test_context, released(json!({}))).await, Next::After(Duration::from_secs(1)));
        assert_eq!(test_context.finish().await, ["VolumeFailedDelete"]);
    }
}
