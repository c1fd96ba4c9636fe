//! Stale loop devices. The image for which such a device was attached was deleted or replaced, or its user has bound the device to another
//! file, so the device is attached to another file than the volume's image.
//!
//! The user of a device can set its label. So a device counts as that of a volume if it was published for the volume, or if it
//! is mounted at a target of the volume. The label only selects among unmounted devices, and never one that is bound to an image.

use nix::sys::stat::FileStat;

use super::cleanup::Cleanup;
use super::devices::PublishedDevices;
use super::mounted::{MountedDevices, is_loop_device, number_of};
use crate::error::{ErrorKind, Result};
use crate::loop_device::{BackingFile, LoopDevice, Status, query_device};
use crate::volume_store::{AbnormalReason, Condition, VolumeId, VolumeStats, VolumeStore};

/// A loop device of a volume that is not attached to the volume's image.
#[derive(Debug)]
pub(super) struct StaleDevice {
    status: Status,
    /// The image of the volume that has the id now. `None` if there is no such volume.
    image: Option<BackingFile>,
}

impl StaleDevice {
    /// Returns the stale device whose node is at a target of the volume with this status.
    pub(super) fn at_path(
        store: &VolumeStore,
        devices: &PublishedDevices,
        volume: &VolumeId,
        image: Option<BackingFile>,
        status: &FileStat,
    ) -> Result<Option<Self>> {
        if !is_loop_device(status) {
            return Ok(None);
        }
        let number = number_of(status);
        let status = match query_device(number, |number| LoopDevice::open_device_number(number)?.status()) {
            Ok(status) => status,
            Err(error) if error.kind() == ErrorKind::Busy => return Err(error),
            Err(_) => return Ok(None),
        };
        let backing = status.binding.backing;
        let is_ours = devices.volume_of(number).is_some() || store.holds(&backing);
        // Then the path is a target of that volume.
        let is_of_other = || -> Result<bool> { Ok(store.images()?.contains_key(&backing)) };
        if image == Some(backing) || !is_ours || is_of_other()? {
            return Ok(None);
        }
        devices.assign(number, volume);
        if devices.volume_of(number).flatten().is_some_and(|held| held != *volume) {
            return Ok(None);
        }
        Ok(Self::of(image, status))
    }

    /// Returns the devices that are labelled as those of a deleted volume. Queries every loop device.
    pub(super) fn all_for_deleted(
        store: &VolumeStore,
        devices: &PublishedDevices,
        volume: &VolumeId,
    ) -> Result<Vec<Self>> {
        let list = devices.loops().list()?;
        for error in list.skipped {
            devices.report(&format!(
                "skipped a loop device in the search for those of the deleted volume {volume}: {error}"
            ));
        }
        let mut found: Vec<Status> = list.devices;
        found.retain(|status| status.is_labelled(volume.as_str()) && store.holds(&status.binding.backing));
        if found.is_empty() {
            return Ok(Vec::new());
        }
        // Read after the devices: no image is attached before it exists.
        let images = store.images()?;
        let stale = found.into_iter().filter(|status| !images.contains_key(&status.binding.backing));
        Ok(stale.map(|status| Self { status, image: None }).collect())
    }

    /// Returns the device of a volume, if it is not attached to the image.
    pub(super) fn of(image: Option<BackingFile>, status: Status) -> Option<Self> {
        (image != Some(status.binding.backing)).then_some(Self { status, image })
    }

    /// Detaches the device, unless its node is mounted: the number of a detached device is reused for other volumes.
    pub(super) fn detach(&self, devices: &PublishedDevices, mounted: &MountedDevices) -> Result<Cleanup> {
        // The device is opened by its binding, because it may have been detached since and its index reused.
        let device = match LoopDevice::open_binding(&self.status.binding) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Cleanup::Complete),
            device => device?,
        };
        let number = device.device_number()?;
        if mounted.find(number, None).is_some() {
            return Ok(Cleanup::Complete);
        }
        drop(devices.release(number));
        // A deferred detach is repeated.
        if !self.status.auto_clear {
            devices.report(&format!(
                "detaching a loop device whose file is not the volume's image: {}",
                self.status.binding
            ));
        }
        Ok(devices.loops().detach(device)?.into())
    }

    /// Returns the use and capacity of the volume, as far as the device reports them.
    pub(super) fn stats(&self) -> VolumeStats {
        let size = self.status.size;
        VolumeStats::new(size, size, self.condition())
    }

    pub(super) fn condition(&self) -> Condition {
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
