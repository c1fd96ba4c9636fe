//! Frees the space of deleted volumes in the background.
//!
//! If another program creates and deletes the volumes (on Kubernetes the provisioner), that program also cleans up.
//! This cleanup therefore starts with the first request to create or delete a volume or snapshot that this process
//! serves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use loopfs::publish::Publisher;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::monitor::StorageMonitor;
use crate::blocking;
use crate::error::{Error, Result};

/// The interval of the cleanup. An open file can keep a deleted volume's project id in use, and no event reports that
/// it was closed.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(60);

/// Empties the trash.
#[derive(Debug, Default)]
pub(crate) struct TrashCleanup {
    started: AtomicBool,
    requested: Notify,
}

impl TrashCleanup {
    /// Enables the cleanup, because an earlier process may have left entries in the trash.
    pub(crate) fn start(&self) {
        if !self.started.swap(true, Ordering::Relaxed) {
            self.requested.notify_one();
        }
    }

    /// Requests a cleanup after an entry was moved to the trash.
    pub(crate) fn request(&self) {
        self.started.store(true, Ordering::Relaxed);
        self.requested.notify_one();
    }

    /// Cleans up after each request and every [`CLEANUP_INTERVAL`], until `stop`.
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
                // The call that detected the failure has logged it.
                Err(Error::StorageUnavailable(_) | Error::StorageStarting) => {}
                Err(error) => {
                    tracing::warn!(%error, "could not free the space of deleted volumes; the driver retries within a minute")
                }
            }
            let requested = tokio::time::timeout(CLEANUP_INTERVAL, self.requested.notified());
            // A request and the end of the interval have the same effect.
            match stop.run_until_cancelled(requested).await {
                Some(_requested_or_due) => {}
                None => return Ok(()),
            }
        }
    }
}

/// Empties the trash. If the storage was opened again since the last cleanup, first removes entries that an earlier
/// process left incomplete.
async fn clean(monitor: Arc<StorageMonitor>, recovered: Weak<Publisher>) -> Result<Weak<Publisher>> {
    blocking::run(move || {
        let storage = monitor.verified()?;
        if !Weak::ptr_eq(&recovered, &Arc::downgrade(&storage)) {
            let recovered = storage.store().recover()?;
            tracing::info!(?recovered, "removed the incomplete entries of an earlier process");
        }
        match storage.store().empty_trash()? {
            0 => {}
            volumes => tracing::info!(volumes, "freed the space of deleted volumes"),
        }
        Ok(Arc::downgrade(&storage))
    })
    .await
}
