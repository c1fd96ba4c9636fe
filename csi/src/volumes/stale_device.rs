//! Stale loop devices. The image for which such a device was attached was deleted or replaced, so the device is
//! attached to another file than the volume's image. The label of a device names the volume for which it was attached.

use loopfs::Bytes;
use loopfs::loop_device::{BackingFile, Detach, LoopDevice, Status};
use loopfs::volume_store::{AbnormalReason, Condition, VolumeId, VolumeStats};
use nix::sys::stat::FileStat;

use crate::error::Result;
use crate::loop_node::{is_loop_device, number_of};
use crate::mounted_devices::MountedDevices;
use crate::storage::Storage;

/// A loop device of a volume that is not attached to the volume's image.
#[derive(Debug)]
pub(crate) struct StaleDevice {
    status: Status,
    /// The image of the volume that has the id now. `None` if there is no such volume.
    image: Option<BackingFile>,
}

impl StaleDevice {
    /// Returns the stale device whose node is at a path with this status.
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

    /// Returns the devices of a deleted volume. Queries every loop device.
    pub(crate) fn all_for_deleted(storage: &Storage, volume: &VolumeId) -> Result<Vec<Self>> {
        let bound = storage.loops.list()?.devices;
        let stale_devices = bound.into_iter().filter_map(|status| Self::of(storage, volume, None, status));
        // If the kernel truncated the label, the device may belong to another volume.
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

    /// Detaches the device, unless its node is mounted: the number of a detached device is reused for other volumes.
    pub(crate) fn detach(&self, storage: &Storage, mounted: &MountedDevices) -> Result<()> {
        // The device is opened by its binding, because it may have been detached since and its index reused.
        let Ok(device) = LoopDevice::open_binding(&self.status.binding) else { return Ok(()) };
        let number = device.device_number()?;
        if mounted.find(number, None).is_some() {
            return Ok(());
        }
        drop(storage.held.release(number));
        tracing::warn!(device = %device.path().display(), binding = %self.status.binding,
            "detaching a loop device whose file is not the volume's image");
        match storage.loops.detach(device)? {
            Detach::Detached => {}
            Detach::Deferred(_) => {
                tracing::info!(
                    "a process has the stale loop device open; the kernel detaches it at the last close"
                )
            }
        }
        Ok(())
    }

    /// Returns the use and capacity of the volume, as far as the device reports them.
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
                    "the image was removed, and only {device} still has its content; copy the content before the volume is \
                     unpublished, because it is lost then"
                ),
            ),
            Some(image) => Condition::abnormal(
                AbnormalReason::DeviceOfOtherFile,
                format!(
                    "{device} is attached to {bound_to}, but the image is {image}: the image was replaced while it was in use, \
                     and data written to the device is lost; unpublish and publish the volume"
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
        let image = storage
            .store
            .volume(&id)
            .and_then(|volume| volume.open_image(loopfs::loop_device::Access::ReadOnly));
        if image.and_then(BackingFile::of).is_ok_and(|image| image == status.binding.backing) {
            return Ok(true);
        }
    }
    Ok(false)
}
