//! Frees what deleted volumes held, in the background.
//!
//! Where something else makes and deletes the volumes (on Kubernetes the provisioner), that one cleans up, and this one
//! never begins: it does with the first volume that this process is asked to make or delete.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::monitor::{Storage, StorageMonitor};
use crate::blocking;
use crate::error::{Error, Result};

/// What a deleted volume leaves may be held by an open file, of which nobody tells when it is closed.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(60);

/// Empties the trash.
#[derive(Debug, Default)]
pub(crate) struct TrashCleanup {
    started: AtomicBool,
    requested: Notify,
}

impl TrashCleanup {
    /// An earlier process may have left something.
    pub(crate) fn start(&self) {
        if !self.started.swap(true, Ordering::Relaxed) {
            self.requested.notify_one();
        }
    }

    /// There is something in the trash.
    pub(crate) fn request(&self) {
        self.started.store(true, Ordering::Relaxed);
        self.requested.notify_one();
    }

    /// Cleans up whenever it is requested, until `stop`.
    pub(crate) async fn run(
        self: Arc<Self>,
        monitor: Arc<StorageMonitor>,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        if stop.run_until_cancelled(self.requested.notified()).await.is_none() {
            return Ok(());
        }
        let mut recovered = Weak::new();
        loop {
            match clean(Arc::clone(&monitor), recovered.clone()).await {
                Ok(storage) => recovered = storage,
                // Said already, by the call that found it out.
                Err(Error::StorageUnavailable(_) | Error::StorageStarting) => {}
                Err(error) => {
                    tracing::warn!(%error, "what deleted volumes held is not freed; this is retried")
                }
            }
            let requested = tokio::time::timeout(CLEANUP_INTERVAL, self.requested.notified());
            // Whether by a call or by time makes no difference.
            match stop.run_until_cancelled(requested).await {
                Some(_called_or_due) => {}
                None => return Ok(()),
            }
        }
    }
}

/// Empties the trash; before the first time on a storage takes away what was left half made there.
async fn clean(monitor: Arc<StorageMonitor>, recovered: Weak<Storage>) -> Result<Weak<Storage>> {
    blocking::run(move || {
        let storage = monitor.verified()?;
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
