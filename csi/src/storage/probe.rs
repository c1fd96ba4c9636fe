//! Whether volumes can be served now: found out anew each time, by a change to the data file system and a question to the
//! loop driver.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::gate::{Health, StorageGate, WRITE_TIMEOUT};
use crate::blocking;
use crate::error::{Error, Result};

/// How often the driver probes its storage by itself.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// Answers probes.
#[derive(Debug)]
pub(crate) struct Probe {
    gate: Arc<StorageGate>,
    patience: Duration,
    /// One examination at a time: on a disk that hangs, each would hold a thread for good.
    examination: Mutex<Option<Examination>>,
}

#[derive(Debug)]
struct Examination {
    since: Instant,
    outcome: JoinHandle<Result<Health>>,
}

impl Probe {
    pub(crate) fn new(gate: Arc<StorageGate>) -> Self {
        Self { gate, patience: WRITE_TIMEOUT, examination: Mutex::default() }
    }

    /// Probes the storage every [`PROBE_INTERVAL`] until `stop`, so that a failure is known to calls that do not find it
    /// out by themselves: they would hang on a disk that hangs.
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
    pub(crate) async fn health(&self) -> Result<Health> {
        let gate = Arc::clone(&self.gate);
        self.examine(move || gate.probe()).await
    }

    async fn examine(&self, examine: impl FnOnce() -> Result<Health> + Send + 'static) -> Result<Health> {
        // Whoever waits here waits for an examination that is under way.
        let Ok(mut examination) = tokio::time::timeout(self.patience, self.examination.lock()).await else {
            return Err(self.gate.hangs_for(self.patience));
        };
        let current = examination.get_or_insert_with(|| {
            // Known to the gate for exactly as long as it lasts, whether or not a caller still waits for it.
            let in_progress = self.gate.begin_examination();
            let examine = move || {
                let _in_progress = in_progress;
                examine()
            };
            Examination { since: Instant::now(), outcome: tokio::spawn(blocking::run(examine)) }
        });
        let Ok(outcome) = tokio::time::timeout(self.patience, &mut current.outcome).await else {
            return Err(self.gate.hangs_for(current.since.elapsed()));
        };
        *examination = None;
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
        let gate = Arc::new(StorageGate::new("/nowhere".into(), root));
        let probe = Probe { patience: Duration::from_millis(50), ..Probe::new(gate) };
        let (answer, answered) = mpsc::channel::<()>();
        let answered = Arc::new(std::sync::Mutex::new(answered));
        let begun = Arc::new(AtomicUsize::new(0));
        let hanging = || {
            let (answered, begun) = (Arc::clone(&answered), Arc::clone(&begun));
            move || {
                begun.fetch_add(1, Ordering::Relaxed);
                answered.lock().unwrap().recv().ok();
                Ok(Health::Ready)
            }
        };
        for _ in 0..3 {
            let error = probe.examine(hanging()).await.unwrap_err();
            assert!(error.to_string().contains("has not ended"), "{error}");
        }
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        answer.send(()).unwrap();
        let patient = Probe { patience: Duration::from_secs(60), ..probe };
        assert_eq!(patient.examine(hanging()).await.unwrap(), Health::Ready, "what was begun is waited for");
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        answer.send(()).unwrap();
        assert_eq!(patient.examine(hanging()).await.unwrap(), Health::Ready);
        assert_eq!(begun.load(Ordering::Relaxed), 2);
    }
}
