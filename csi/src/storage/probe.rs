//! Probes of the storage. Each probe writes to the data file system and queries the loop driver.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use super::monitor::{Readiness, StorageMonitor, WRITE_TIMEOUT};
use crate::blocking;
use crate::error::Result;

/// The interval at which the driver probes its storage itself.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// Runs probes, one at a time.
#[derive(Debug)]
pub(crate) struct Probe {
    monitor: Arc<StorageMonitor>,
    timeout: Duration,
    /// The probe that is in progress. There is one at a time, because each would block a thread while the disk hangs.
    running: Mutex<Option<RunningProbe>>,
}

#[derive(Debug)]
struct RunningProbe {
    since: Instant,
    outcome: JoinHandle<Result<Readiness>>,
}

impl Probe {
    pub(crate) fn new(monitor: Arc<StorageMonitor>) -> Self {
        Self { monitor, timeout: WRITE_TIMEOUT, running: Mutex::default() }
    }

    /// Probes the storage every [`PROBE_INTERVAL`]. Calls that do not detect a failure themselves then
    /// return its error, where they would otherwise block on a hanging disk.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut failed = false;
        loop {
            // A disk that hangs from the start is detected as soon as the storage is open, which needs no write.
            self.monitor.wait_until_present().await;
            match self.health().await {
                Ok(_) => failed = false,
                Err(error) => {
                    if !failed {
                        tracing::error!(%error, "the storage probe failed; volumes cannot be served");
                    }
                    failed = true;
                }
            }
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
    }

    /// Returns whether volumes can be served, or the reason why not.
    pub(crate) async fn health(&self) -> Result<Readiness> {
        let monitor = Arc::clone(&self.monitor);
        self.run_shared(move || monitor.probe()).await
    }

    async fn run_shared(
        &self,
        run_shared: impl FnOnce() -> Result<Readiness> + Send + 'static,
    ) -> Result<Readiness> {
        // The caller that holds the mutex waits for a probe that is in progress.
        let Ok(mut running) = tokio::time::timeout(self.timeout, self.running.lock()).await else {
            return Err(self.monitor.hang_error_after(self.timeout));
        };
        let current = running.get_or_insert_with(|| {
            // The monitor counts the probe as in progress for exactly as long as it runs, even if no caller waits for
            // it.
            let in_progress = self.monitor.begin_probe();
            let run_shared = move || {
                let _in_progress = in_progress;
                run_shared()
            };
            RunningProbe { since: Instant::now(), outcome: tokio::spawn(blocking::run(run_shared)) }
        });
        let Ok(outcome) = tokio::time::timeout(self.timeout, &mut current.outcome).await else {
            return Err(self.monitor.hang_error_after(current.since.elapsed()));
        };
        *running = None;
        outcome?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_hanging_disk_is_reported_and_blocks_one_thread() {
        let root = Arc::new(loopfs::publish::PublishRoot::open(std::path::Path::new("/")).unwrap());
        let monitor =
            Arc::new(StorageMonitor::new("csi.loopfs.dev".parse().unwrap(), "/nowhere".into(), root));
        let probe = Probe { timeout: Duration::from_millis(50), ..Probe::new(monitor) };
        let (release, release_receiver) = mpsc::channel::<()>();
        let release_receiver = Arc::new(std::sync::Mutex::new(release_receiver));
        let begun = Arc::new(AtomicUsize::new(0));
        let hanging = || {
            let (release_receiver, begun) = (Arc::clone(&release_receiver), Arc::clone(&begun));
            move || {
                begun.fetch_add(1, Ordering::Relaxed);
                release_receiver.lock().unwrap().recv().ok();
                Ok(Readiness::Ready)
            }
        };
        for _ in 0..3 {
            let error = probe.run_shared(hanging()).await.unwrap_err();
            assert!(error.to_string().contains("has not ended"), "{error}");
        }
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        release.send(()).unwrap();
        let slow = Probe { timeout: Duration::from_secs(60), ..probe };
        assert_eq!(
            slow.run_shared(hanging()).await.unwrap(),
            Readiness::Ready,
            "the probe in progress is awaited"
        );
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        release.send(()).unwrap();
        assert_eq!(slow.run_shared(hanging()).await.unwrap(), Readiness::Ready);
        assert_eq!(begun.load(Ordering::Relaxed), 2);
    }
}
