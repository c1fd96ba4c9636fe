//! Checks the condition of all volumes at an interval, logs changes, and counts abnormal volumes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use loopfs::volume_store::{AbnormalReason, Condition, VolumeId};
use prometheus_client::registry::Registry;
use service::Gauges;
use tokio::sync::watch;

use crate::error::Error;
use crate::request::ListRequest;
use crate::services::VolumeOperations;
use crate::storage::StorageMonitor;

/// The findings of the latest check.
#[derive(Debug)]
struct ConditionFindings {
    abnormal: BTreeMap<VolumeId, (AbnormalReason, String)>,
    /// The end of the check, as the time since the Unix epoch.
    ended: Duration,
    took: Duration,
}

/// The checks and their latest findings.
#[derive(Debug)]
pub(crate) struct ConditionChecks {
    interval: Duration,
    found: watch::Sender<Option<ConditionFindings>>,
}

impl ConditionChecks {
    pub(crate) fn new(interval: Duration) -> Self {
        Self { interval, found: watch::Sender::new(None) }
    }

    /// Registers the latest findings. Reasons without volumes count 0. There are no findings before the first check, and if the storage was
    /// unavailable. If the volumes cannot be checked for another reason, the earlier findings stay, and the metric of their time
    /// tells their age.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let found = self.found.borrow();
        let Some(ConditionFindings { abnormal, ended, took }) = &*found else { return };
        let count = |reason| abnormal.values().filter(|(found, _)| *found == reason).count() as u64;
        let by_reason = AbnormalReason::ALL.into_iter().map(|reason| (reason.as_str(), count(reason)));
        let help = "Abnormal volumes by reason, as of the last check";
        registry.counts("abnormal_volumes", help, "reason", by_reason);
        let help = "End of the last check of the conditions, as seconds since the Unix epoch";
        registry.seconds("condition_check_timestamp", help, *ended);
        let help = "Duration of the last check of the conditions";
        registry.seconds("condition_check_duration", help, *took);
    }

    /// Checks all volumes at the interval.
    pub(crate) async fn run(self: Arc<Self>, operations: VolumeOperations, monitor: Arc<StorageMonitor>) {
        let mut known = BTreeMap::new();
        loop {
            monitor.wait_until_available().await;
            match check_volumes(&operations).await {
                Ok(findings) => {
                    log_changes(&known, &findings.abnormal);
                    known.clone_from(&findings.abnormal);
                    self.found.send_replace(Some(findings));
                }
                // The reason was logged when the storage became unavailable. Another disk may come back.
                Err(Error::StorageUnavailable(_) | Error::StorageStarting) => {
                    self.found.send_replace(None);
                }
                Err(error) => {
                    tracing::warn!(%error, "could not check the condition of the volumes; the earlier findings stay, and the next check retries");
                }
            }
            tokio::time::sleep(self.interval).await;
        }
    }
}

async fn check_volumes(operations: &VolumeOperations) -> Result<ConditionFindings, Error> {
    let started = Instant::now();
    let all = ListRequest { from: None, max_entries: None };
    let page = operations
        .unlocked(move |volumes| volumes.list(&all, |volume| volume.condition != Condition::Healthy))
        .await?;
    let abnormal = page.items.into_iter().filter_map(|info| match info.condition {
        Condition::Healthy => None,
        Condition::Abnormal { reason, message } => Some((info.volume, (reason, message))),
    });
    Ok(ConditionFindings {
        abnormal: abnormal.collect(),
        ended: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
        took: started.elapsed(),
    })
}

/// Logs the changes since the previous check.
fn log_changes(
    known: &BTreeMap<VolumeId, (AbnormalReason, String)>,
    now: &BTreeMap<VolumeId, (AbnormalReason, String)>,
) {
    for (volume, (reason, message)) in now {
        if known.get(volume).is_none_or(|(before, _)| before != reason) {
            tracing::warn!(%volume, %reason, "the volume is abnormal: {message}");
        }
    }
    for volume in known.keys().filter(|volume| !now.contains_key(volume)) {
        tracing::info!(%volume, "the volume is healthy again, or was deleted");
    }
}
