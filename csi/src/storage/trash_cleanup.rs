//! Frees the space of deleted volumes in the background.

use std::sync::{Arc, Weak};
use std::time::Duration;

use loopfs::publish::Publisher;
use tokio::sync::Notify;

use super::monitor::StorageMonitor;
use super::throttle::{BackgroundThrottle, ForegroundCalls};
use crate::blocking;
use crate::changes::Changes;
use crate::error::{Error, Result};

/// The interval of the cleanup. An open file can keep a deleted volume's project id in use, and no event reports that
/// it was closed.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(60);

/// Empties the trash.
#[derive(Debug)]
pub(crate) struct TrashCleanup {
    monitor: Arc<StorageMonitor>,
    foreground: Arc<ForegroundCalls>,
    changes: Arc<Changes>,
    requested: Notify,
}

impl TrashCleanup {
    pub(crate) fn new(
        monitor: Arc<StorageMonitor>,
        foreground: Arc<ForegroundCalls>,
        changes: Arc<Changes>,
    ) -> Self {
        Self { monitor, foreground, changes, requested: Notify::new() }
    }

    /// Requests a cleanup after an entry was moved to the trash.
    pub(crate) fn request(&self) {
        self.requested.notify_one();
    }

    /// Cleans up when the storage was opened, after each request and every [`CLEANUP_INTERVAL`].
    pub(crate) async fn run(self: Arc<Self>) {
        let mut recovered = Weak::new();
        loop {
            self.monitor.wait_until_available().await;
            match self.clean(recovered.clone()).await {
                Ok(storage) => recovered = storage,
                // The call that detected the failure has logged it.
                Err(Error::StorageUnavailable(_) | Error::StorageStarting) => {}
                Err(error) => {
                    tracing::warn!(%error, "could not free the space of deleted volumes; the driver retries within a minute")
                }
            }
            tokio::select! {
                () = self.requested.notified() => {}
                // It is cleaned up as soon as it is available again.
                () = self.monitor.wait_until_unavailable() => {}
                () = tokio::time::sleep(CLEANUP_INTERVAL) => {}
            }
        }
    }

    /// Empties the trash. If the storage was opened again since the last cleanup, first removes entries that an earlier
    /// process left incomplete.
    async fn clean(&self, recovered: Weak<Publisher>) -> Result<Weak<Publisher>> {
        let (monitor, changes) = (Arc::clone(&self.monitor), Arc::clone(&self.changes));
        let mut throttle = BackgroundThrottle::new(Arc::clone(&self.foreground));
        blocking::run(move || {
            let storage = monitor.verified()?;
            let mut now_recovered = recovered;
            if !Weak::ptr_eq(&now_recovered, &Arc::downgrade(&storage)) {
                match storage.store().recover() {
                    Ok(recovered) => {
                        tracing::info!(?recovered, "removed the incomplete entries of an earlier process");
                        changes.freed();
                        now_recovered = Arc::downgrade(&storage);
                    }
                    // The trash is emptied all the same.
                    Err(error) => {
                        tracing::warn!(%error, "could not remove the incomplete entries of an earlier process; the driver retries within a minute");
                    }
                }
            }
            match storage.store().empty_trash_yielding(|| throttle.yield_now()) {
                Ok(0) => {}
                Ok(volumes) => {
                    tracing::info!(volumes, "freed the space of deleted volumes");
                    changes.freed();
                }
                Err(error) => {
                    // Other entries may have been removed.
                    changes.freed();
                    return Err(error.into());
                }
            }
            Ok(now_recovered)
        })
        .await
    }
}
