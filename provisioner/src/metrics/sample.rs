//! The values of one scrape.

use std::time::Duration;

use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use service::Gauges;

use super::findings::AuditFindings;
use super::operations::Operations;
use crate::api::events::EventCounter;
use crate::api::queue_metrics::QueueMetrics;
use crate::api::traffic::ApiTraffic;

const PREFIX: &str = "loopfs_provisioner";

/// The help of the metric that both roles serve.
pub(crate) const POLICIES_ENFORCED: &str =
    "1 if the API server refuses what the admission policies forbid to this process, else 0";

/// The values of the process and its node at one moment.
#[derive(Debug)]
pub(crate) struct ProvisionerSample {
    /// Claims of this node that have no volume yet.
    pub(crate) claims_waiting: usize,
    /// Claims of this node's volumes that request a larger size than they have.
    pub(crate) expansions_waiting: usize,
    /// The number of claims and PersistentVolumes whose last attempt failed, and that are tried again later.
    pub(crate) retries_waiting: [(&'static str, u64); 2],
    /// `true` if the API server enforces the admission policies. `None` while that is unknown.
    pub(crate) policies_enforced: Option<bool>,
    /// `true` if the API server answered the latest request. `None` before the first.
    pub(crate) api_server_reachable: Option<bool>,
    pub(crate) storage_open: bool,
    /// The findings of the last audit, and when it ended, as the time since the Unix epoch.
    pub(crate) audit: Option<(AuditFindings, Duration)>,
}

/// Returns the registry of all metrics. Values that are unknown now are omitted; they are neither 0 nor the last known value.
pub(crate) fn register(
    operations: &Operations,
    events: &EventCounter,
    traffic: &ApiTraffic,
    queues: &QueueMetrics,
    sample: &ProvisionerSample,
) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", "Version of the provisioner", version);
    operations.register(&mut registry);
    events.register(&mut registry);
    traffic.register(&mut registry);
    queues.register(&mut registry);
    registry.count(
        "claims_waiting",
        "Claims for which this node was selected and that have no volume yet",
        sample.claims_waiting as u64,
    );
    registry.count(
        "expansions_waiting",
        "Claims of this node's volumes that request a larger size than they have",
        sample.expansions_waiting as u64,
    );
    let help = "Objects whose last attempt failed, and that are tried again after a wait";
    registry.counts("retries_waiting", help, "queue", sample.retries_waiting);
    if let Some(enforced) = sample.policies_enforced {
        registry.count("policies_enforced", POLICIES_ENFORCED, u64::from(enforced));
    }
    if let Some(reachable) = sample.api_server_reachable {
        registry.count(
            "api_server_reachable",
            "1 if the API server answered the latest request, or a watch delivered something since, else 0",
            u64::from(reachable),
        );
    }
    registry.count(
        "storage_open",
        "1 if the driver reports that the data file system can be used, else 0; an event on the Node has the reason",
        u64::from(sample.storage_open),
    );
    if let Some((findings, ended)) = &sample.audit {
        let found = [
            ("volume_without_pv", findings.orphans.len() as u64),
            ("pv_without_volume", findings.missing.len() as u64),
        ];
        let help = "Orphaned volumes, and PersistentVolumes without a volume, found by the last audit";
        registry.counts("audit_findings", help, "finding", found);
        registry.seconds("audit_timestamp", "Unix time at which the last audit ended", *ended);
    }
    registry
}
