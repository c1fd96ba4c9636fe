//! What every reconcile shares.

use std::sync::Arc;

use k8s_openapi::{
    api::{
        core::v1::{PersistentVolume, PersistentVolumeClaim},
        storage::v1::StorageClass,
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    runtime::reflector::{ObjectRef, Store},
};
use loopfs::Bytes;
use tokio::sync::{Notify, watch};

use crate::{
    backoff::Backoff, events::Events, identity::Identity, in_flight::InFlight, intents::Intents,
    own_writes::OwnWrites, storage::Storage,
};

/// The process's view of the world and its hands.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) identity: Identity,
    pub(crate) events: Events,
    pub(crate) storage: Arc<Storage>,
    pub(crate) intents: Intents,

    /// Claims that could concern this node.
    pub(crate) claims: Store<PersistentVolumeClaim>,
    /// This node's volumes.
    pub(crate) volumes: Store<PersistentVolume>,
    /// All storage classes.
    pub(crate) classes: Store<StorageClass>,

    pub(crate) claim_writes: OwnWrites<PersistentVolumeClaim>,
    pub(crate) volume_writes: OwnWrites<PersistentVolume>,

    pub(crate) claim_backoff: Backoff<ObjectRef<PersistentVolumeClaim>, Circumstances>,
    pub(crate) volume_backoff: Backoff<ObjectRef<PersistentVolume>, Circumstances>,

    /// Keeps provisioning and the removal of orphans out of each other's way.
    pub(crate) in_flight: InFlight,
    /// There is something in the trash.
    pub(crate) trash: Notify,
    /// A claim is gone or a watch was renewed: intents may have been orphaned.
    pub(crate) claims_vanished: Notify,
    pub(crate) chances: Chances,
    /// The time that goes into conditions.
    pub(crate) now: fn() -> Timestamp,
}

/// What the outcome of an attempt depends on. While it is the same, attempts are spaced by back-off.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Circumstances {
    /// The object itself: one of the same name made later is another.
    pub(crate) uid: Option<String>,
    /// The size asked for.
    pub(crate) requested: Option<Bytes>,
    /// For a volume: its form, which an administrator may have changed in order to help.
    pub(crate) volume_version: Option<String>,
    /// See [`Chances`].
    pub(crate) chance: u64,
}

/// Counts the times when what failed before may work now: space was freed, the store has become usable, or a storage class
/// was changed.
#[derive(Debug)]
pub(crate) struct Chances {
    counter: watch::Sender<u64>,
}

impl Default for Chances {
    fn default() -> Self {
        Chances { counter: watch::Sender::new(0) }
    }
}

impl Chances {
    pub(crate) fn current(&self) -> u64 {
        *self.counter.borrow()
    }

    pub(crate) fn improve(&self) {
        self.counter.send_modify(|counter| *counter += 1);
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.counter.subscribe()
    }
}

impl Context {
    /// Returns once every cache holds what the API server has.
    pub(crate) async fn synced(&self) {
        // An error means that a watch has ended, which ends the process.
        let _ended = tokio::join!(
            self.claims.wait_until_ready(),
            self.volumes.wait_until_ready(),
            self.classes.wait_until_ready()
        );
    }

    /// The newest known form of one of this node's volumes.
    pub(crate) fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        let key = ObjectRef::new(name);
        match self.volumes.get(&key) {
            Some(cached) => Some(self.volume_writes.newest(cached)),
            None => self.volume_writes.get(&key),
        }
    }

    pub(crate) fn volume_api(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    pub(crate) fn claim_api(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }
}
