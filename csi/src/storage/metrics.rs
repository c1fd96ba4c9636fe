//! The metrics of the storage.

use loopfs::publish::Publisher;
use prometheus_client::registry::Registry;
use service::Gauges;

use super::StorageMonitor;

impl StorageMonitor {
    /// Registers whether the storage is available. Registers its space and the numbers of volumes and devices, and returns `true`, if it
    /// is. This accesses no volume, but lists two directories and sysfs, which takes about 10 µs for each attached device and 1 µs
    /// for each volume. Blocks.
    pub(crate) fn register(&self, registry: &mut Registry) -> bool {
        let registered = self.verified().and_then(|storage| Ok(register_counts(registry, &storage)?));
        if let Err(error) = &registered {
            tracing::debug!(%error, "omitting the metrics of the storage, which is unavailable");
        }
        let help = "1 if the storage is available and volumes can be served, else 0; the log has the reason";
        registry.count("storage_open", help, u64::from(registered.is_ok()));
        registered.is_ok()
    }
}

fn register_counts(registry: &mut Registry, publisher: &Publisher) -> loopfs::Result<()> {
    let (store, loops) = (publisher.store(), publisher.devices().loops());
    let (space, volumes, devices) = (store.space()?, store.counts()?, loops.counts()?);
    registry.bytes("store_capacity", "Size of the data file system", space.total.0);
    registry.bytes("store_available", "Size of the largest volume that can be created", space.available.0);
    registry.bytes("store_promised", "Bytes reserved for volumes, whether used or not", space.reserved.0);
    let kinds = [("Filesystem", volumes.directories as u64), ("Block", volumes.images as u64)];
    registry.counts("volumes", "Volumes by kind", "kind", kinds);
    let trash = "Files and directories of deleted volumes that are not freed yet";
    registry.count("trash_entries", trash, volumes.trash as u64);
    registry.count("attached_devices", "Loop devices that are attached to a file", devices.attached as u64);
    let idle = "Idle loop devices that are kept for the next attachments";
    registry.count("idle_devices", idle, loops.idle() as u64);
    let buffered = "Attached loop devices whose I/O goes through the page cache";
    registry.count("devices_without_direct_io", buffered, devices.without_direct_io as u64);
    Ok(())
}
