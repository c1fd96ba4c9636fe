//! Looks over all volumes from time to time: what is wrong with one is logged when it is found, and counted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use loopfs::{AbnormalReason, Condition, VolumeId};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::request::List;
use crate::storage::StorageMonitor;
use crate::volumes::VolumeOperations;

/// What was wrong when it was looked last.
#[derive(Debug)]
pub(crate) struct Findings {
    abnormal: BTreeMap<VolumeId, (AbnormalReason, String)>,
    ended: Duration,
    took: Duration,
}

impl Findings {
    /// How many volumes each reason was found of; those found of none too.
    pub(crate) fn by_reason(&self) -> impl Iterator<Item = (AbnormalReason, usize)> {
        let count = |reason| self.abnormal.values().filter(|(found, _)| *found == reason).count();
        AbnormalReason::ALL.into_iter().map(move |reason| (reason, count(reason)))
    }

    /// Since 1970.
    pub(crate) fn ended(&self) -> Duration {
        self.ended
    }

    pub(crate) fn took(&self) -> Duration {
        self.took
    }
}

/// The audit, and what it has found.
#[derive(Debug)]
pub(crate) struct Audit {
    interval: Duration,
    found: watch::Sender<Option<Arc<Findings>>>,
}

impl Audit {
    pub(crate) fn new(interval: Duration) -> Self {
        Self { interval, found: watch::Sender::new(None) }
    }

    /// None before the first, and while volumes cannot be looked at.
    pub(crate) fn findings(&self) -> Option<Arc<Findings>> {
        self.found.borrow().clone()
    }

    /// Looks again and again, until `stop`.
    pub(crate) async fn run(
        self: Arc<Self>,
        operations: VolumeOperations,
        monitor: Arc<StorageMonitor>,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let mut known = BTreeMap::new();
        let endless = async {
            loop {
                monitor.wait_until_available().await;
                match check_volumes(&operations).await {
                    Ok(findings) => {
                        log_changes(&known, &findings.abnormal);
                        known.clone_from(&findings.abnormal);
                        self.found.send_replace(Some(Arc::new(findings)));
                    }
                    Err(error) => {
                        self.found.send_replace(None);
                        // Why the storage is closed was said when it was.
                        if !matches!(error, Error::StorageUnavailable(_) | Error::StorageStarting) {
                            tracing::warn!(%error, "volumes could not be looked over; this is retried");
                        }
                    }
                }
                tokio::time::sleep(self.interval).await;
            }
        };
        match stop.run_until_cancelled(endless).await {
            Some(never) => never,
            None => Ok(()),
        }
    }
}

async fn check_volumes(operations: &VolumeOperations) -> Result<Findings, Error> {
    let started = Instant::now();
    let all = List { from: None, at_most: None };
    let page = operations
        .unlocked(move |volumes| volumes.list(&all, |volume| volume.condition != Condition::Healthy))
        .await?;
    let abnormal = page.volumes.into_iter().filter_map(|info| match info.condition {
        Condition::Healthy => None,
        Condition::Abnormal { reason, message } => Some((info.volume, (reason, message))),
    });
    Ok(Findings {
        abnormal: abnormal.collect(),
        ended: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
        took: started.elapsed(),
    })
}

/// Says what has changed.
fn log_changes(
    known: &BTreeMap<VolumeId, (AbnormalReason, String)>,
    now: &BTreeMap<VolumeId, (AbnormalReason, String)>,
) {
    for (volume, (reason, message)) in now {
        if known.get(volume).is_none_or(|(before, _)| before != reason) {
            tracing::warn!(%volume, %reason, "abnormal: {message}");
        }
    }
    for volume in known.keys().filter(|volume| !now.contains_key(volume)) {
        tracing::info!(%volume, "not abnormal any more, or deleted");
    }
}
