//! Loop devices that were attached for a volume, and are bound to another file than its image: the image was removed or
//! replaced since. Their label says for which volume they were made.

use loopfs::{
    AbnormalReason, BackingFile, Bytes, Condition, Detach, LoopDevice, Status, VolumeId, VolumeStats,
};
use nix::sys::stat::FileStat;

use super::loop_node::{is_loop_device, number_of};
use super::mounted_devices::MountedDevices;
use crate::error::Result;
use crate::storage::Storage;

/// A device of a volume that is not bound to its image.
#[derive(Debug)]
pub(crate) struct StaleDevice {
    status: Status,
    /// Of the volume that has the id now; None where there is none.
    image: Option<BackingFile>,
}

impl StaleDevice {
    /// The one that a path with this status shows.
    pub(crate) fn at_path(
        storage: &Storage,
        volume: &VolumeId,
        image: Option<BackingFile>,
        status: &FileStat,
    ) -> Result<Option<Self>> {
        if !is_loop_device(status) {
            return Ok(None);
        }
        let device = LoopDevice::open_device_number(number_of(status));
        let Ok(status) = device.and_then(|device| device.status()) else { return Ok(None) };
        Ok(Self::of(storage, volume, image, status))
    }

    /// Those of a volume that is gone. Asks every device.
    pub(crate) fn all_for_deleted(storage: &Storage, volume: &VolumeId) -> Result<Vec<Self>> {
        let bound = storage.loops.snapshot()?;
        let stale_devices = bound.into_iter().filter_map(|status| Self::of(storage, volume, None, status));
        // Where the label was cut, the device may be another volume's.
        let mut found = Vec::new();
        for stale in stale_devices {
            if !is_an_image(storage, &stale.status)? {
                found.push(stale);
            }
        }
        Ok(found)
    }

    pub(super) fn of(
        storage: &Storage,
        volume: &VolumeId,
        image: Option<BackingFile>,
        status: Status,
    ) -> Option<Self> {
        let backing = &status.binding.backing;
        let stale =
            status.is_labelled(volume.as_str()) && storage.store.holds(backing) && image != Some(*backing);
        stale.then_some(Self { status, image })
    }

    /// Takes the device away unless a mount shows it, for its number is given to other volumes.
    pub(crate) fn detach(&self, storage: &Storage, mounted: &MountedDevices) -> Result<()> {
        // By its binding: it may have been taken away since, and its index given to another.
        let Ok(device) = LoopDevice::open_binding(&self.status.binding) else { return Ok(()) };
        if mounted.find(device.device_number()?, None).is_some() {
            return Ok(());
        }
        tracing::warn!(device = %device.path().display(), binding = %self.status.binding,
            "a device whose file is not the volume's image is detached");
        match storage.loops.detach(device)? {
            Detach::Gone => {}
            Detach::Deferred(_) => {
                tracing::info!("somebody has it open; the kernel detaches it at the last close")
            }
        }
        Ok(())
    }

    /// What is known of a volume by its device alone.
    pub(crate) fn stats(&self) -> VolumeStats {
        let size = self.status.size;
        VolumeStats {
            capacity: size,
            used: size,
            available: Bytes(0),
            inodes: None,
            condition: self.condition(),
        }
    }

    pub(crate) fn condition(&self) -> Condition {
        let (device, bound_to) =
            (format!("/dev/loop{}", self.status.binding.index), self.status.binding.backing);
        match self.image {
            None => Condition::abnormal(
                AbnormalReason::ImageMissing,
                format!(
                    "the image is gone, and {device} is all that shows its content: copy what is needed before the \
                     volume is unpublished, for then it is lost"
                ),
            ),
            Some(image) => Condition::abnormal(
                AbnormalReason::DeviceOfOtherFile,
                format!(
                    "{device} is bound to {bound_to}, and the image is {image}: it was replaced while it was in use, and \
                     what is written to the device is lost; unpublish and publish the volume"
                ),
            ),
        }
    }
}

fn is_an_image(storage: &Storage, status: &Status) -> Result<bool> {
    for id in storage.store.list()? {
        if !status.is_labelled(id.as_str()) {
            continue;
        }
        let image = storage.store.volume(&id).and_then(|volume| volume.open_image(loopfs::Access::ReadOnly));
        if image.and_then(BackingFile::of).is_ok_and(|image| image == status.binding.backing) {
            return Ok(true);
        }
    }
    Ok(false)
}
