//! What is published, read once for a list of volumes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::directory::Directory;
use super::mounted::MountedDevices;
use super::publisher::Publisher;
use super::stale::StaleDevice;
use crate::error::Result;
use crate::loop_device::{BackingFile, LoopDevice, Status, query_devices};
use crate::mount::KnownMount;
use crate::volume_store::{Condition, Volume, VolumeId, VolumeKind};

/// The mounts below the root and the published devices, at the time when they were read.
#[derive(Debug)]
pub struct Publications<'a> {
    publisher: &'a Publisher,
    mounts: Vec<KnownMount>,
    mounted: MountedDevices,
    devices: HashMap<VolumeId, Vec<Status>>,
}

impl<'a> Publications<'a> {
    /// Reads what is published. The label of a device does not prove its volume, because the user of the device can set it.
    ///
    /// # Errors
    /// Those of reading the mount table.
    pub fn read(publisher: &'a Publisher) -> Result<Self> {
        let mounts = publisher.root().mounts()?;
        let mounted = publisher.root().mounted_devices()?;
        let is_mounted = |number| mounted.find(number, None).is_some();
        let volumes: HashMap<_, _> =
            publisher.devices().all().into_iter().filter(|(number, _)| is_mounted(*number)).collect();
        let status = |number| LoopDevice::open_device_number(number).and_then(|device| device.status());
        let mut devices: HashMap<VolumeId, Vec<Status>> = HashMap::new();
        for (number, status) in query_devices(volumes.keys().copied().collect(), status) {
            if let (Some(Some(volume)), Ok(status)) = (volumes.get(&number), status) {
                devices.entry(volume.clone()).or_default().push(status);
            }
        }
        Ok(Self { publisher, mounts, mounted, devices })
    }

    /// Returns whether a volume is published, and its condition.
    ///
    /// # Errors
    /// Those of opening the volume and its devices.
    pub fn of(&self, volume: &Volume) -> Result<(bool, Condition)> {
        let place = match volume.kind() {
            VolumeKind::Filesystem => Directory::open(volume)?.published_at(&self.mounts, None),
            VolumeKind::Block => {
                let block = self.publisher.block(volume)?;
                if let Some(stale) = self.stale(volume.id(), Some(block.image()?)) {
                    return Ok((true, stale.condition()));
                }
                block.published_at(&self.mounted, None)?
            }
        };
        Ok((place.is_some(), self.publisher.stats(volume)?.condition))
    }

    /// Returns the targets at which a volume is published. Those of a device may be outside of the root.
    ///
    /// # Errors
    /// Those of opening the volume and its devices.
    pub fn targets(&self, volume: &Volume) -> Result<Vec<PathBuf>> {
        match volume.kind() {
            VolumeKind::Filesystem => {
                Ok(Directory::open(volume)?.targets(&self.mounts).map(Path::to_owned).collect())
            }
            VolumeKind::Block => {
                let numbers = self.publisher.block(volume)?.numbers()?;
                let shown = self.mounted.mount_points().filter(|(_, number)| numbers.contains(number));
                Ok(shown.map(|(target, _)| target.to_owned()).collect())
            }
        }
    }

    /// Returns the condition of a volume that was deleted while its device was published.
    #[must_use]
    pub fn of_deleted(&self, volume: &VolumeId) -> Option<Condition> {
        self.stale(volume, None).map(|stale| stale.condition())
    }

    /// Returns the volumes for which the mounted devices were published. They may have been deleted.
    pub fn of_devices(&self) -> impl Iterator<Item = VolumeId> {
        self.devices.keys().cloned()
    }

    fn stale(&self, volume: &VolumeId, image: Option<BackingFile>) -> Option<StaleDevice> {
        let devices = self.devices.get(volume)?;
        devices.iter().find_map(|status| StaleDevice::of(image, status.clone()))
    }
}
