//! The definitions of the metrics.

use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use service::Gauges;

use super::calls::Calls;
use super::sample::{DriverSample, StorageSample};

const PREFIX: &str = "loopfs_csi";

/// Returns all current values. A value that cannot be determined is omitted, rather than reported as 0 or with its last
/// value.
pub(crate) fn register(calls: &Calls, sample: &DriverSample) -> Registry {
    let mut registry = Registry::with_prefix(PREFIX);
    let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", "Version of the driver", version);
    calls.register(&mut registry);
    let available = u64::from(sample.storage.is_some());
    registry.count(
        "storage_open",
        "1 if the storage is available and volumes can be served, else 0; the log has the reason",
        available,
    );
    if let Some(storage) = &sample.storage {
        register_storage(&mut registry, storage);
    }
    if let Some(audit) = &sample.audit {
        register_audit(&mut registry, audit);
    }
    registry
}

fn register_storage(registry: &mut Registry, storage: &StorageSample) {
    let StorageSample { space, census, devices, idle } = storage;
    registry.bytes("store_capacity", "Size of the data file system", space.total.0);
    registry.bytes("store_available", "Size of the largest volume that can be created", space.available.0);
    registry.bytes("store_promised", "Bytes reserved for volumes, whether used or not", space.reserved.0);
    let volumes = [("Filesystem", census.directories as u64), ("Block", census.images as u64)];
    registry.counts("volumes", "Volumes by kind", "kind", volumes);
    let trash = "Files and directories of deleted volumes that are not freed yet";
    registry.count("trash_entries", trash, census.trash as u64);
    registry.count("attached_devices", "Loop devices that are attached to a file", devices.attached as u64);
    registry.count("idle_devices", "Idle loop devices that are kept for the next attachments", *idle as u64);
    let buffered = "Attached loop devices whose I/O goes through the page cache";
    registry.count("devices_without_direct_io", buffered, devices.without_direct_io as u64);
}

fn register_audit(registry: &mut Registry, audit: &crate::audit::ConditionFindings) {
    registry.counts(
        "abnormal_volumes",
        "Abnormal volumes by reason, as of the last audit",
        "reason",
        audit.by_reason().map(|(reason, count)| (reason.as_str(), count as u64)),
    );
    registry.seconds(
        "audit_timestamp",
        "End of the last audit, as seconds since the Unix epoch",
        audit.ended(),
    );
    registry.seconds("audit_duration", "Duration of the last audit", audit.took());
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use loopfs::loop_device::DeviceCounts;
    use loopfs::volume_store::{Space, StoreCounts};
    use prometheus_client::encoding::text;
    use service::documentation::{documented, served};

    use super::*;
    use crate::audit::ConditionFindings;

    #[test]
    fn served_metrics_are_the_documented_ones() {
        let calls = Calls::new();
        // Counters without a value are not served.
        calls.count_cancelled("/csi.v1.Identity/Probe");
        let storage = StorageSample {
            space: Space::default(),
            census: StoreCounts::default(),
            devices: DeviceCounts::default(),
            idle: 0,
        };
        let sample =
            DriverSample { storage: Some(storage), audit: Some(Arc::new(ConditionFindings::default())) };
        let mut registry = register(&calls, &sample);
        service::register_readiness(&mut registry, true);
        let mut page = String::new();
        text::encode(&mut page, &registry).unwrap();
        assert_eq!(served(&page), documented("loopfs_csi_"));
    }
}
