//! The state that all reconciles of a node share.

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

/// The state that all reconciles of a node share: access to the cluster and the store, caches, back-off and signals.
pub(crate) struct Context {
    pub(crate) cluster: Cluster,
    pub(crate) storage: Arc<Storage>,
    pub(crate) intents: Intents,

    /// Cache of the claims that could concern this node.
    pub(crate) claims: Store<PersistentVolumeClaim>,
    /// Cache of this node's PersistentVolumes.
    pub(crate) volumes: Store<PersistentVolume>,
    /// Cache of all storage classes.
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

    /// Excludes provisioning and the removal of an orphaned volume from working on the same volume.
    pub(crate) in_flight: InFlight,
    /// Notified when an entry was moved to the trash.
    pub(crate) trash: Notify,
    /// Notified when a claim was deleted or a watch restarted: records of provisioning may have been orphaned.
    pub(crate) claims_vanished: Notify,
    pub(crate) retry_generation: RetryGeneration,
    /// Notified when the free capacity may have decreased, or a published CSIStorageCapacity was changed.
    pub(crate) capacity: Notify,
    pub(crate) operations: Operations,
    pub(crate) audit: LatestFindings,
    /// Returns the time for conditions.
    pub(crate) now: fn() -> Timestamp,
}

/// The parts that a [`Context`] is created from. Its other fields start empty.
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

/// The values on which the outcome of an attempt depends. While they stay the same, back-off spaces the attempts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RetryKey {
    /// The UID of the object, which a newer object of the same name does not share.
    pub(crate) uid: Option<String>,
    /// The requested size.
    pub(crate) requested: Option<Bytes>,
    /// For a PersistentVolume: its resource version. An administrator may have changed it to solve the problem.
    pub(crate) volume_version: Option<String>,
    /// For a claim without a volume: the resource version of its storage class.
    pub(crate) class_version: Option<String>,
    /// See [`RetryGeneration`].
    pub(crate) retry_generation: u64,
}

impl Context {
    /// Returns once every cache has received its first list.
    pub(crate) async fn synced(&self) {
        tokio::join!(self.claims_synced.wait(), self.volumes_synced.wait(), self.classes_synced.wait());
    }

    /// Returns the newest known version of one of this node's PersistentVolumes.
    pub(crate) fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        let key = ObjectRef::new(name);
        match self.volumes.get(&key) {
            Some(cached) => Some(self.volume_writes.newest(cached)),
            None => self.volume_writes.get(&key),
        }
    }
}
