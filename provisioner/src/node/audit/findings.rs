//! The findings of the last audit.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use loopfs::volume_store::VolumeId;
use prometheus_client::registry::Registry;
use service::Gauges;
use tokio::sync::watch;

/// The findings of an audit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct AuditFindings {
    /// Orphaned volumes: no PersistentVolume names them.
    pub(crate) orphans: BTreeSet<VolumeId>,
    /// PersistentVolumes whose volume is missing, by name, and why.
    pub(crate) missing: BTreeMap<String, String>,
}

impl AuditFindings {
    pub(crate) fn is_empty(&self) -> bool {
        self.orphans.is_empty() && self.missing.is_empty()
    }

    /// Returns the findings that both comparisons have in common.
    pub(crate) fn confirmed_by(self, later: AuditFindings) -> AuditFindings {
        AuditFindings {
            orphans: self.orphans.intersection(&later.orphans).cloned().collect(),
            missing: later.missing.into_iter().filter(|(name, _)| self.missing.contains_key(name)).collect(),
        }
    }
}

/// The findings of the last audit, and when it ended, as the time since the Unix epoch.
#[derive(Debug)]
pub(crate) struct LatestFindings(watch::Sender<Option<(AuditFindings, Duration)>>);

impl Default for LatestFindings {
    fn default() -> Self {
        LatestFindings(watch::Sender::new(None))
    }
}

impl LatestFindings {
    pub(crate) fn set(&self, findings: Option<AuditFindings>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.0.send_replace(findings.map(|findings| (findings, now)));
    }

    /// Registers the latest findings. There are none before the first audit, and while the storage is unavailable. If a request to the
    /// API server fails, the earlier ones stay, and the metric of their time tells their age.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let latest = self.0.borrow();
        let Some((findings, ended)) = &*latest else { return };
        let found = [
            ("volume_without_pv", findings.orphans.len() as u64),
            ("pv_without_volume", findings.missing.len() as u64),
        ];
        let help = "Orphaned volumes, and PersistentVolumes without a volume, found by the last audit";
        registry.counts("audit_findings", help, "finding", found);
        registry.seconds("audit_timestamp", "Unix time at which the last audit ended", *ended);
    }
}
