//! The mounts below the kubelet directory, read once for a list of volumes.

use std::collections::HashMap;

use loopfs::loop_device::{BackingFile, LoopDevice, Status, query_devices};
use loopfs::mount::KnownMount;
use loopfs::volume_store::VolumeId;

use super::stale_device::StaleDevice;
use crate::error::Result;
use crate::mounted_devices::MountedDevices;
use crate::storage::Storage;

/// The mounts below the kubelet directory, and the loop devices that are mounted there.
#[derive(Debug, Default)]
pub(crate) struct PublishedMounts {
    pub(crate) mounts: Vec<KnownMount>,
    pub(crate) mounted: MountedDevices,
    devices: HashMap<VolumeId, Vec<Status>>,
}

impl PublishedMounts {
    /// Reads the status of each mounted device that this driver holds for a volume. The label of a device proves nothing, because a pod
    /// can set it.
    pub(crate) fn read(storage: &Storage, mounts: Vec<KnownMount>) -> Result<Self> {
        let mounted = MountedDevices::among(&mounts)?;
        let is_mounted = |number| mounted.find(number, None).is_some();
        let volumes: HashMap<_, _> =
            storage.held.all().into_iter().filter(|(number, _)| is_mounted(*number)).collect();
        let status = |number| LoopDevice::open_device_number(number).and_then(|device| device.status());
        let mut devices: HashMap<VolumeId, Vec<Status>> = HashMap::new();
        for (number, status) in query_devices(volumes.keys().copied().collect(), status) {
            if let (Some(Some(volume)), Ok(status)) = (volumes.get(&number), status) {
                devices.entry(volume.clone()).or_default().push(status);
            }
        }
        Ok(Self { mounts, mounted, devices })
    }

    /// Returns the stale device that was published for this volume, if one is mounted.
    pub(crate) fn stale(&self, volume: &VolumeId, image: Option<BackingFile>) -> Option<StaleDevice> {
        let devices = self.devices.get(volume)?;
        devices.iter().find_map(|status| StaleDevice::of(image, status.clone()))
    }

    /// Returns the volumes for which the mounted devices were published. They may have been deleted.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = VolumeId> {
        self.devices.keys().cloned()
    }
}
