//! Frees what deleted volumes held, in the background.
//!
//! Where something else makes and deletes the volumes (on Kubernetes the provisioner), that one cleans up, and this one
//! never begins: it does with the first volume that this process is asked to make or delete.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::gate::{Storage, StorageGate};
use crate::blocking;
use crate::error::{Error, Result};

/// What a deleted volume leaves may be held by an open file, of which nobody tells when it is closed.
const EVERY: Duration = Duration::from_secs(60);

/// Empties the trash.
#[derive(Debug, Default)]
pub(crate) struct Janitor {
    begun: AtomicBool,
    wanted: Notify,
}

impl Janitor {
    /// An earlier process may have left something.
    pub(crate) fn begin(&self) {
        if !self.begun.swap(true, Ordering::Relaxed) {
            self.wanted.notify_one();
        }
    }

    /// There is something in the trash.
    pub(crate) fn call(&self) {
        self.begun.store(true, Ordering::Relaxed);
        self.wanted.notify_one();
    }

    /// Cleans up whenever it is called, until `stop`.
    pub(crate) async fn run(
        self: Arc<Self>,
        gate: Arc<StorageGate>,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        if stop.run_until_cancelled(self.wanted.notified()).await.is_none() {
            return Ok(());
        }
        let mut recovered = Weak::new();
        loop {
            match clean(Arc::clone(&gate), recovered.clone()).await {
                Ok(storage) => recovered = storage,
                // Said already, by the call that found it out.
                Err(Error::StorageClosed(_) | Error::StorageStarting) => {}
                Err(error) => {
                    tracing::warn!(%error, "what deleted volumes held is not freed; this is retried")
                }
            }
            let called = tokio::time::timeout(EVERY, self.wanted.notified());
            // Whether by a call or by time makes no difference.
            match stop.run_until_cancelled(called).await {
                Some(_called_or_due) => {}
                None => return Ok(()),
            }
        }
    }
}

/// Empties the trash; before the first time on a storage takes away what was left half made there.
async fn clean(gate: Arc<StorageGate>, recovered: Weak<Storage>) -> Result<Weak<Storage>> {
    blocking::run(move || {
        let storage = gate.verified()?;
        if !Weak::ptr_eq(&recovered, &Arc::downgrade(&storage)) {
            let recovered = storage.store.recover()?;
            tracing::info!(?recovered, "what an earlier process left half made is taken away");
        }
        match storage.store.empty_trash()? {
            0 => {}
            volumes => tracing::info!(volumes, "the space of deleted volumes is free again"),
        }
        Ok(Arc::downgrade(&storage))
    })
    .await
}
