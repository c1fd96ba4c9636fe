//! The state that all reconciles of a node share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::reflector::{ObjectRef, Store};
use loopfs::Bytes;
use tokio::sync::{Notify, SetOnce, watch};

use crate::api::absence;
use crate::api::backoff::{self, Backoff};
use crate::api::cluster::Cluster;
use crate::api::mutation_cache::MutationCache;
use crate::api::policies::Enforced;
use crate::api::pruned::Pruned;
use crate::api::queue::KubernetesObject;
use crate::api::queue_metrics::QueueMetrics;
use crate::claim_labels::scope::CurrentScope;
use crate::error::Error;
use crate::node::audit::LatestFindings;
use crate::node::operations::Operations;
use crate::objects::ownership;
use crate::store::driver::Driver;
use crate::store::in_flight::InFlight;
use crate::store::storage::Storage;

/// The state that all reconciles of a node share: access to the cluster and the driver, caches, back-off and signals.
pub(crate) struct Context {
    pub(crate) cluster: Cluster,
    pub(crate) storage: Storage,

    /// The claims that this node watches.
    pub(crate) claim_scope: CurrentScope,
    /// The claims that could concern this node.
    pub(crate) claims: ControllerState<PersistentVolumeClaim>,
    /// This node's PersistentVolumes.
    pub(crate) volumes: ControllerState<PersistentVolume>,
    /// Cache of all storage classes.
    pub(crate) classes: Store<StorageClass>,
    pub(crate) classes_synced: SetOnce<()>,

    /// Locks on volumes. Provisioning, deletion and the removal of an orphaned volume exclude each other, and copies of the volume.
    pub(crate) in_flight: InFlight,
    /// Notified when a claim was deleted or a watch restarted: pending volumes may have been orphaned.
    pub(crate) claims_deleted: Notify,
    /// The retry generation. It increases when failed operations may succeed on a retry, because space was freed or the store became usable.
    pub(crate) retry_generation: watch::Sender<u64>,
    /// Notified when the free capacity may have decreased, or a published CSIStorageCapacity was changed.
    pub(crate) capacity: Notify,
    pub(crate) operations: Operations,
    pub(crate) queues: QueueMetrics,
    pub(crate) audit: LatestFindings,
    /// `Some(true)` if the API server enforces the admission policies.
    pub(crate) policies: watch::Sender<Enforced>,
    /// Returns the time for conditions.
    pub(crate) now: fn() -> Timestamp,
}

impl Context {
    /// Creates a context with a driver whose state is unknown.
    pub(crate) fn new(
        cluster: Cluster,
        driver: Arc<dyn Driver>,
        claims: Store<PersistentVolumeClaim>,
        volumes: Store<PersistentVolume>,
        classes: Store<StorageClass>,
        now: fn() -> Timestamp,
    ) -> Self {
        Self {
            cluster,
            storage: Storage::new(driver),
            claim_scope: Default::default(),
            claims: ControllerState::new(claims),
            volumes: ControllerState::new(volumes),
            classes,
            classes_synced: Default::default(),
            in_flight: Default::default(),
            claims_deleted: Default::default(),
            retry_generation: Default::default(),
            capacity: Default::default(),
            operations: Default::default(),
            queues: Default::default(),
            audit: Default::default(),
            policies: Default::default(),
            now,
        }
    }

    /// Lets failed operations be retried that wait for free space or for the store.
    pub(crate) fn bump_retry_generation(&self) {
        self.retry_generation.send_modify(|generation| *generation += 1);
    }

    /// Returns once every cache has received its first list.
    pub(crate) async fn synced(&self) {
        tokio::join!(self.claims.synced.wait(), self.volumes.synced.wait(), self.classes_synced.wait());
    }

    /// Returns the newest known version of one of this node's PersistentVolumes.
    pub(crate) fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        let key = ObjectRef::new(name);
        match self.volumes.cache.get(&key) {
            Some(cached) => Some(self.volumes.writes.newest(cached)),
            None => self.volumes.writes.get(&key),
        }
    }

    /// Returns a claim, if it could concern this node. If the node watches only claims with its label, a claim that is not in the
    /// cache is read: it may have lost the label.
    pub(crate) async fn claim(
        &self,
        key: &ObjectRef<PersistentVolumeClaim>,
    ) -> Result<Option<Arc<PersistentVolumeClaim>>, Error> {
        let cached = self.claims.cache.get(key);
        if cached.is_some() || !self.claim_scope.may_hide_claims() {
            return Ok(cached);
        }
        let api = self.cluster.claim_api(key.namespace.as_deref().unwrap_or_default());
        let read = absence::get_opt(&api, &key.name).await;
        let claim = read.map_err(|error| Error::api("read claim", &key.name, error))?.map(Pruned::into_inner);
        let is_of_interest = |claim: &_| ownership::is_claim_of_interest(claim, &self.cluster.identity);
        Ok(claim.filter(is_of_interest).map(Arc::new))
    }
}

/// The state of the controller of one type of object.
pub(crate) struct ControllerState<K: KubernetesObject> {
    pub(crate) cache: Store<K>,
    pub(crate) synced: SetOnce<()>,
    pub(crate) writes: MutationCache<K>,
    pub(crate) backoff: Backoff<ObjectRef<K>, RetryKey>,
    pub(crate) conflicts: Backoff<ObjectRef<K>, ()>,
}

impl<K: KubernetesObject> ControllerState<K> {
    fn new(cache: Store<K>) -> Self {
        ControllerState {
            cache,
            synced: Default::default(),
            writes: Default::default(),
            backoff: Default::default(),
            conflicts: Backoff::new(backoff::CONFLICT),
        }
    }

    /// Removes the state of objects that were deleted while the watch was interrupted: they cause no change of their own. Sets the
    /// signal that the cache is synced.
    pub(crate) fn listed(&self) {
        let is_cached = |key: &ObjectRef<K>| self.cache.get(key).is_some();
        self.writes.retain(is_cached);
        self.backoff.retain(is_cached);
        self.conflicts.retain(is_cached);
        self.synced.set(()).ok();
    }

    /// Returns the remaining wait after a conflict or a failure, or `None` if an attempt is allowed now.
    pub(crate) fn remaining(&self, key: &ObjectRef<K>, retry_key: &RetryKey) -> Option<Duration> {
        let now = now();
        let in_any_generation = RetryKey { retry_generation: None, ..retry_key.clone() };
        let waits = [retry_key, &in_any_generation];
        self.conflicts
            .remaining(key, &(), now)
            .or_else(|| waits.into_iter().find_map(|retry_key| self.backoff.remaining(key, retry_key, now)))
    }

    /// Records a failed attempt. Returns the wait before the next one. The next retry generation ends the wait early only if the attempt
    /// `awaits_storage`. Otherwise a failed copy would cause its own retry, and that of all other objects, because the driver frees its
    /// space.
    pub(crate) fn failed(&self, key: ObjectRef<K>, retry_key: RetryKey, awaits_storage: bool) -> Duration {
        let retry_generation = retry_key.retry_generation.filter(|_| awaits_storage);
        self.backoff.failed(key, RetryKey { retry_generation, ..retry_key }, now())
    }

    /// Records an attempt that another change of the object has prevented. Returns the wait before the next one.
    pub(crate) fn conflicted(&self, key: ObjectRef<K>) -> Duration {
        self.conflicts.failed(key, (), now())
    }

    /// Returns `true` if an attempt failed and none has succeeded since. No change of the object may have caused the next one.
    pub(crate) fn has_failed(&self, key: &ObjectRef<K>) -> bool {
        self.conflicts.has_failed(key) || self.backoff.has_failed(key)
    }

    /// Returns the number of objects whose last attempt failed, and that are tried again later.
    pub(crate) fn retries_waiting(&self) -> u64 {
        (self.backoff.len() + self.conflicts.len()) as u64
    }

    /// Stores the response to a write of an object. If the write failed, the version in the mutation cache may be stale, and is
    /// removed.
    pub(crate) fn remember(&self, object: &K, response: kube::Result<Pruned<K>>) -> kube::Result<Arc<K>> {
        match response {
            Ok(written) => Ok(self.writes.remember(written.into_inner())),
            Err(error) => {
                self.writes.forget(&ObjectRef::from_obj(object));
                Err(error)
            }
        }
    }
}

/// Tests pause the clock of their runtime.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The values on which the outcome of an attempt depends. While they stay the same, back-off spaces the attempts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RetryKey {
    /// The UID of the object, which a newer object of the same name does not share.
    pub(crate) uid: Option<String>,
    /// The requested size.
    pub(crate) requested: Option<Bytes>,
    /// The resource version of the PersistentVolume, or for a claim without a volume, of the one that has its name. An administrator may have
    /// changed it to solve the problem.
    pub(crate) volume_version: Option<String>,
    /// For a claim without a volume: the resource version of its storage class.
    pub(crate) class_version: Option<String>,
    /// See [`Context::retry_generation`]. `None` if the outcome depends neither on the free space nor on whether the store is open.
    pub(crate) retry_generation: Option<u64>,
}
