//! What every reconcile shares.

use std::sync::Arc;

use k8s_openapi::{
    api::{
        core::v1::{PersistentVolume, PersistentVolumeClaim},
        storage::v1::StorageClass,
    },
    jiff::Timestamp,
};
use kube::runtime::reflector::{ObjectRef, Store};
use loopfs::Bytes;
use tokio::sync::Notify;

use crate::{
    api::{
        backoff::{self, Backoff},
        cluster::Cluster,
        mutation_cache::MutationCache,
        signals::{RetryGeneration, SyncSignal},
    },
    metrics::{LatestFindings, Operations},
    store::{in_flight::InFlight, intents::Intents, storage::Storage},
};

/// The process's view of the world and its hands.
pub(crate) struct Context {
    pub(crate) cluster: Cluster,
    pub(crate) storage: Arc<Storage>,
    pub(crate) intents: Intents,

    /// Claims that could concern this node.
    pub(crate) claims: Store<PersistentVolumeClaim>,
    /// This node's volumes.
    pub(crate) volumes: Store<PersistentVolume>,
    /// All storage classes.
    pub(crate) classes: Store<StorageClass>,

    pub(crate) claims_synced: SyncSignal,
    pub(crate) volumes_synced: SyncSignal,
    pub(crate) classes_synced: SyncSignal,

    pub(crate) claim_writes: MutationCache<PersistentVolumeClaim>,
    pub(crate) volume_writes: MutationCache<PersistentVolume>,

    pub(crate) claim_backoff: Backoff<ObjectRef<PersistentVolumeClaim>, RetryKey>,
    pub(crate) volume_backoff: Backoff<ObjectRef<PersistentVolume>, RetryKey>,

    pub(crate) claim_conflicts: Backoff<ObjectRef<PersistentVolumeClaim>, ()>,
    pub(crate) volume_conflicts: Backoff<ObjectRef<PersistentVolume>, ()>,

    /// Keeps provisioning and the removal of orphans out of each other's way.
    pub(crate) in_flight: InFlight,
    /// There is something in the trash.
    pub(crate) trash: Notify,
    /// A claim is gone or a watch was renewed: intents may have been orphaned.
    pub(crate) claims_vanished: Notify,
    pub(crate) retry_generation: RetryGeneration,
    /// There may be less room than was published, or what was published was changed.
    pub(crate) capacity: Notify,
    pub(crate) operations: Operations,
    pub(crate) audit: LatestFindings,
    /// The time that goes into conditions.
    pub(crate) now: fn() -> Timestamp,
}

/// What a [`Context`] is made from; the rest of it begins empty.
pub(crate) struct ContextParts {
    pub(crate) cluster: Cluster,
    pub(crate) storage: Arc<Storage>,
    pub(crate) intents: Intents,
    pub(crate) claims: Store<PersistentVolumeClaim>,
    pub(crate) volumes: Store<PersistentVolume>,
    pub(crate) classes: Store<StorageClass>,
    pub(crate) now: fn() -> Timestamp,
}

impl Context {
    pub(crate) fn new(parts: ContextParts) -> Self {
        let ContextParts { cluster, storage, intents, claims, volumes, classes, now } = parts;
        Self {
            cluster,
            storage,
            intents,
            claims,
            volumes,
            classes,
            claims_synced: Default::default(),
            volumes_synced: Default::default(),
            classes_synced: Default::default(),
            claim_writes: Default::default(),
            volume_writes: Default::default(),
            claim_backoff: Default::default(),
            volume_backoff: Default::default(),
            claim_conflicts: Backoff::new(backoff::CONFLICT),
            volume_conflicts: Backoff::new(backoff::CONFLICT),
            in_flight: Default::default(),
            trash: Default::default(),
            claims_vanished: Default::default(),
            retry_generation: Default::default(),
            capacity: Default::default(),
            operations: Default::default(),
            audit: Default::default(),
            now,
        }
    }
}

/// What the outcome of an attempt depends on. While it is the same, attempts are spaced by back-off.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RetryKey {
    /// The object itself: one of the same name made later is another.
    pub(crate) uid: Option<String>,
    /// The size asked for.
    pub(crate) requested: Option<Bytes>,
    /// For a volume: its form, which an administrator may have changed in order to help.
    pub(crate) volume_version: Option<String>,
    /// For a claim without a volume: the form of its storage class.
    pub(crate) class_version: Option<String>,
    /// See [`RetryGeneration`].
    pub(crate) retry_generation: u64,
}

impl Context {
    /// Returns once every cache holds what the API server has.
    pub(crate) async fn synced(&self) {
        tokio::join!(self.claims_synced.wait(), self.volumes_synced.wait(), self.classes_synced.wait());
    }

    /// The newest known form of one of this node's volumes.
    pub(crate) fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        let key = ObjectRef::new(name);
        match self.volumes.get(&key) {
            Some(cached) => Some(self.volume_writes.newest(cached)),
            None => self.volume_writes.get(&key),
        }
    }
}
