//! What a Prometheus server is told. The names are listed in README.md, which a test compares with what is served.

use std::fmt;

use prometheus_client::encoding::text;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

mod calls;
mod snapshot;

pub(crate) use calls::{Calls, Metered};
pub(crate) use snapshot::Snapshot;

const PREFIX: &str = "loopfs_csi";

/// The text format's name (OpenMetrics 1.0).
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labelled = Family<[(&'static str, &'static str); 1], Gauge>;

/// Writes down everything that is known now. What cannot be found out is left out, rather than told as 0 or as it was.
pub(crate) fn encode(calls: &Calls, snapshot: &Snapshot) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(PREFIX);
    let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", "Version of the driver", version);
    calls.register(&mut registry);
    let open = u64::from(snapshot.storage.is_some());
    gauge(
        &mut registry,
        "storage_open",
        "Whether volumes can be served: 1, or 0 and the reason in the log",
        open,
    );
    if let Some(storage) = &snapshot.storage {
        register_storage(&mut registry, storage);
    }
    if let Some(audit) = &snapshot.audit {
        register_audit(&mut registry, audit);
    }
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

fn register_storage(registry: &mut Registry, storage: &snapshot::Storage) {
    let snapshot::Storage { space, census, devices, idle } = storage;
    bytes(registry, "store_capacity", "Size of the data file system", space.total.0);
    bytes(registry, "store_available", "Size of the largest volume that can be made now", space.available.0);
    bytes(registry, "store_promised", "Promised to volumes, whether used or not", space.promised.0);
    let volumes = Labelled::default();
    for (kind, count) in [("Filesystem", census.directories), ("Block", census.images)] {
        volumes.get_or_create(&[("kind", kind)]).set(signed(count));
    }
    registry.register("volumes", "Volumes by kind", volumes);
    let trash = "What deleted volumes left that is not freed yet: files and directories";
    gauge(registry, "trash_entries", trash, census.trash as u64);
    gauge(registry, "attached_devices", "Loop devices that are bound to a file", devices.attached as u64);
    gauge(registry, "idle_devices", "Loop devices that are kept for the next attachments", *idle as u64);
    let buffered = "Attached loop devices whose I/O goes through the page cache";
    gauge(registry, "devices_without_direct_io", buffered, devices.without_direct_io as u64);
}

fn register_audit(registry: &mut Registry, audit: &crate::audit::Findings) {
    let abnormal = Labelled::default();
    for (reason, count) in audit.by_reason() {
        abnormal.get_or_create(&[("reason", reason.as_str())]).set(signed(count));
    }
    registry.register(
        "abnormal_volumes",
        "Volumes that are not as they were made, by reason, as of the last audit",
        abnormal,
    );
    seconds(registry, "audit_timestamp", "When the last audit ended, since 1970", audit.ended());
    seconds(registry, "audit_duration", "How long the last audit took", audit.took());
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register(name, help, whole(value));
}

fn bytes(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register_with_unit(name, help, Unit::Bytes, whole(value));
}

fn whole(value: u64) -> Gauge {
    let gauge = Gauge::default();
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
    gauge
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn seconds(registry: &mut Registry, name: &str, help: &str, value: std::time::Duration) {
    let gauge = Gauge::<f64, std::sync::atomic::AtomicU64>::default();
    gauge.set(value.as_secs_f64());
    registry.register_with_unit(name, help, Unit::Seconds, gauge);
}
