//! Frees the space of deleted volumes in the background, and throttles such work while the driver serves calls.
//!
//! Background work and calls use the same processors and the same log of the file system. A call that is served while a million files are
//! deleted would wait for many of them. Deletion therefore pauses while a call is in progress. Each pause is
//! short, so deletion also completes on a node that is never idle.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use loopfs::publish::Publisher;
use tokio::sync::Notify;

use crate::blocking;
use crate::changes::Changes;
use crate::error::{Error, Result};
use crate::storage::StorageMonitor;

/// The interval of the cleanup. An open file can keep a deleted volume's project id in use, and no event reports that
/// it was closed.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(60);

/// Time of background work between two pauses. Short compared with a call.
const WORK_SLICE: Duration = Duration::from_millis(10);
/// Longest pause, however many calls there are.
const MAX_PAUSE: Duration = Duration::from_millis(100);

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

/// The calls in progress.
#[derive(Debug, Default)]
pub(crate) struct ForegroundCalls {
    in_progress: Mutex<usize>,
    ended: Condvar,
}

/// A call, in progress until this is dropped.
#[derive(Debug)]
pub(crate) struct ForegroundCall(Arc<ForegroundCalls>);

impl ForegroundCalls {
    /// Registers a call.
    pub(crate) fn enter(self: &Arc<Self>) -> ForegroundCall {
        *self.lock() += 1;
        ForegroundCall(Arc::clone(self))
    }

    /// Returns `true` if no call is in progress.
    pub(crate) fn is_idle(&self) -> bool {
        *self.lock() == 0
    }

    /// Blocks until no call is in progress or the timeout expires.
    fn wait_until_idle(&self, timeout: Duration) {
        let waited = self.ended.wait_timeout_while(self.lock(), timeout, |in_progress| *in_progress > 0);
        drop(waited);
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        // Every critical section is a single step, so a panicked holder leaves it whole.
        self.in_progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ForegroundCall {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.ended.notify_all();
    }
}

/// Pauses one background task.
#[derive(Debug)]
pub(crate) struct BackgroundThrottle {
    foreground: Arc<ForegroundCalls>,
    resumed_at: Instant,
}

impl BackgroundThrottle {
    pub(crate) fn new(foreground: Arc<ForegroundCalls>) -> Self {
        BackgroundThrottle { foreground, resumed_at: Instant::now() }
    }

    /// Pauses if the time slice is used up. The background task calls it between two steps.
    pub(crate) fn yield_now(&mut self) {
        if self.resumed_at.elapsed() >= WORK_SLICE {
            self.foreground.wait_until_idle(MAX_PAUSE);
            self.resumed_at = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const EVER: Duration = Duration::from_secs(3600);

    #[test]
    fn idle_foreground_does_not_pause_background() {
        let foreground = Arc::new(ForegroundCalls::default());
        foreground.wait_until_idle(EVER);
        drop((foreground.enter(), foreground.enter()));
        foreground.wait_until_idle(EVER);
    }

    #[test]
    fn last_foreground_operation_ends_the_pause() {
        const BRIEF: Duration = Duration::from_millis(20);
        let foreground = Arc::new(ForegroundCalls::default());
        let [first, last] = [foreground.enter(), foreground.enter()];
        drop(first);
        let begun = Instant::now();
        foreground.wait_until_idle(BRIEF);
        assert!(begun.elapsed() >= BRIEF, "one call is in progress");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| foreground.wait_until_idle(EVER));
            drop(last);
            waiting.join().unwrap();
        });
    }

    #[test]
    fn endless_foreground_does_not_stop_background() {
        let foreground = Arc::new(ForegroundCalls::default());
        let _guard = foreground.enter();
        let mut throttle = BackgroundThrottle::new(Arc::clone(&foreground));
        let begun = Instant::now();
        for _ in 0..3 {
            throttle.resumed_at -= WORK_SLICE;
            throttle.yield_now();
        }
        assert!(begun.elapsed() >= 3 * MAX_PAUSE, "each step pauses");
    }
}
