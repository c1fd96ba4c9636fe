//! The mounts below the kubelet directory, read once for a list of volumes.

use std::collections::HashMap;

use loopfs::loop_device::{BackingFile, LoopDevice, Status};
use loopfs::mount::KnownMount;
use loopfs::volume_store::VolumeId;

use super::stale_device::StaleDevice;
use crate::error::Result;
use crate::mounted_devices::MountedDevices;
use crate::storage::Storage;

/// The kernel truncates longer labels. A truncated label is only the beginning of an id.
const MAX_LABEL_LEN: usize = 62;

/// The mounts below the kubelet directory, and the loop devices that are mounted there.
#[derive(Debug, Default)]
pub(crate) struct PublishedMounts {
    pub(crate) mounts: Vec<KnownMount>,
    pub(crate) mounted: MountedDevices,
    devices: HashMap<String, Vec<Status>>,
}

impl PublishedMounts {
    /// Reads the status of each mounted device.
    pub(crate) fn read(mounts: Vec<KnownMount>) -> Result<Self> {
        let mut devices: HashMap<String, Vec<Status>> = HashMap::new();
        let mounted = MountedDevices::among(&mounts)?;
        for number in mounted.numbers() {
            if let Ok(status) = LoopDevice::open_device_number(number).and_then(|device| device.status()) {
                devices.entry(status.label.clone()).or_default().push(status);
            }
        }
        Ok(Self { mounts, mounted, devices })
    }

    /// Returns the stale device that was attached for this volume, if one is mounted.
    pub(crate) fn stale(
        &self,
        storage: &Storage,
        volume: &VolumeId,
        image: Option<BackingFile>,
    ) -> Option<StaleDevice> {
        let devices = self.devices.get(volume.as_str())?;
        devices.iter().find_map(|status| StaleDevice::of(storage, volume, image, status.clone()))
    }

    /// Returns the volumes for which the mounted devices were attached. They may have been deleted.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = VolumeId> {
        let whole = self.devices.keys().filter(|label| label.len() <= MAX_LABEL_LEN);
        whole.filter_map(|label| VolumeId::parse(label).ok())
    }
}
