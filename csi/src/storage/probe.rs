//! Whether volumes can be served now: found out anew each time, by a change to the data file system and a question to the
//! loop driver.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::monitor::{Readiness, StorageMonitor, WRITE_TIMEOUT};
use crate::blocking;
use crate::error::{Error, Result};

/// How often the driver probes its storage by itself.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// Answers probes.
#[derive(Debug)]
pub(crate) struct Probe {
    monitor: Arc<StorageMonitor>,
    timeout: Duration,
    /// One running at a time: on a disk that hang, each would hold a thread for good.
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

    /// Probes the storage every [`PROBE_INTERVAL`] until `stop`, so that a failure is known to calls that do not find it
    /// out by themselves: they would hang on a disk that hang.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) -> anyhow::Result<()> {
        let mut failed = false;
        let probing = async {
            loop {
                match self.health().await {
                    Ok(_) => failed = false,
                    Err(error) => {
                        if !failed {
                            tracing::error!(%error, "volumes cannot be served");
                        }
                        failed = true;
                    }
                }
                tokio::time::sleep(PROBE_INTERVAL).await;
            }
        };
        stop.run_until_cancelled(probing).await;
        Ok(())
    }

    /// Why volumes cannot be served, if so.
    pub(crate) async fn health(&self) -> Result<Readiness> {
        let monitor = Arc::clone(&self.monitor);
        self.run_shared(move || monitor.probe()).await
    }

    async fn run_shared(
        &self,
        run_shared: impl FnOnce() -> Result<Readiness> + Send + 'static,
    ) -> Result<Readiness> {
        // Whoever waits here waits for an running that is under way.
        let Ok(mut running) = tokio::time::timeout(self.timeout, self.running.lock()).await else {
            return Err(self.monitor.hang_after(self.timeout));
        };
        let current = running.get_or_insert_with(|| {
            // Known to the monitor for exactly as long as it lasts, whether or not a caller still waits for it.
            let in_progress = self.monitor.begin_probe();
            let run_shared = move || {
                let _in_progress = in_progress;
                run_shared()
            };
            RunningProbe { since: Instant::now(), outcome: tokio::spawn(blocking::run(run_shared)) }
        });
        let Ok(outcome) = tokio::time::timeout(self.timeout, &mut current.outcome).await else {
            return Err(self.monitor.hang_after(current.since.elapsed()));
        };
        *running = None;
        outcome.unwrap_or_else(|panic| Err(Error::Defect(format!("a defect of the driver: {panic}"))))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;
    use crate::target::PublishRoot;

    #[tokio::test]
    async fn a_disk_that_hangs_is_told_of_and_holds_one_thread() {
        let root = Arc::new(PublishRoot::open(std::path::Path::new("/")).unwrap());
        let monitor = Arc::new(StorageMonitor::new("/nowhere".into(), root));
        let probe = Probe { timeout: Duration::from_millis(50), ..Probe::new(monitor) };
        let (answer, answered) = mpsc::channel::<()>();
        let answered = Arc::new(std::sync::Mutex::new(answered));
        let begun = Arc::new(AtomicUsize::new(0));
        let hanging = || {
            let (answered, begun) = (Arc::clone(&answered), Arc::clone(&begun));
            move || {
                begun.fetch_add(1, Ordering::Relaxed);
                answered.lock().unwrap().recv().ok();
                Ok(Readiness::Ready)
            }
        };
        for _ in 0..3 {
            let error = probe.run_shared(hanging()).await.unwrap_err();
            assert!(error.to_string().contains("has not ended"), "{error}");
        }
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        answer.send(()).unwrap();
        let slow = Probe { timeout: Duration::from_secs(60), ..probe };
        assert_eq!(
            slow.run_shared(hanging()).await.unwrap(),
            Readiness::Ready,
            "what was begun is waited for"
        );
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        answer.send(()).unwrap();
        assert_eq!(slow.run_shared(hanging()).await.unwrap(), Readiness::Ready);
        assert_eq!(begun.load(Ordering::Relaxed), 2);
    }
}
