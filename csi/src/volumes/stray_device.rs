//! Loop devices that were attached for a volume, and are bound to another file than its image: the image was removed or
//! replaced since. Their label says for which volume they were made.

use std::collections::HashMap;

use loopfs::{
    AbnormalReason, BackingFile, Bytes, Condition, Detach, LoopDevice, Status, VolumeId, VolumeStats,
    mountinfo,
};
use nix::sys::stat::FileStat;

use super::loop_node::{is_loop_device, number_of};
use super::mounted_devices::MountedDevices;
use crate::error::Result;
use crate::storage::Storage;

/// Longer labels are cut by the kernel, and then say only how an id begins.
const LONGEST_LABEL: usize = 62;

/// A device of a volume that is not bound to its image.
#[derive(Debug)]
pub(crate) struct StrayDevice {
    status: Status,
    /// Of the volume that has the id now; None where there is none.
    image: Option<BackingFile>,
}

impl StrayDevice {
    /// The one that a path with this status shows.
    pub(crate) fn shown(
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
    pub(crate) fn all_of_gone(storage: &Storage, volume: &VolumeId) -> Result<Vec<Self>> {
        let bound = storage.loops.snapshot()?;
        let strays = bound.into_iter().filter_map(|status| Self::of(storage, volume, None, status));
        // Where the label was cut, the device may be another volume's.
        let mut found = Vec::new();
        for stray in strays {
            if !is_an_image(storage, &stray.status)? {
                found.push(stray);
            }
        }
        Ok(found)
    }

    fn of(storage: &Storage, volume: &VolumeId, image: Option<BackingFile>, status: Status) -> Option<Self> {
        let backing = &status.binding.backing;
        let stray =
            status.is_labelled(volume.as_str()) && storage.store.holds(backing) && image != Some(*backing);
        stray.then_some(Self { status, image })
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

/// What is mounted beneath the orchestrator's directory, and which devices are shown there.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) mounts: Vec<mountinfo::Mount>,
    pub(crate) mounted: MountedDevices,
    devices: HashMap<String, Vec<Status>>,
}

impl Shown {
    /// Asks each device that is mounted.
    pub(crate) fn read(mounts: Vec<mountinfo::Mount>) -> Result<Self> {
        let mut devices: HashMap<String, Vec<Status>> = HashMap::new();
        let mounted = MountedDevices::among(&mounts)?;
        for number in mounted.numbers() {
            if let Ok(status) = LoopDevice::open_device_number(number).and_then(|device| device.status()) {
                devices.entry(status.label.clone()).or_default().push(status);
            }
        }
        Ok(Self { mounts, mounted, devices })
    }

    /// A device that was made for the volume, and is bound to another file than its image.
    pub(crate) fn stray(
        &self,
        storage: &Storage,
        volume: &VolumeId,
        image: Option<BackingFile>,
    ) -> Option<StrayDevice> {
        let shown = self.devices.get(volume.as_str())?;
        shown.iter().find_map(|status| StrayDevice::of(storage, volume, image, status.clone()))
    }

    /// Volumes that devices were made for, whether or not they are still there.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = VolumeId> {
        let whole = self.devices.keys().filter(|label| label.len() <= LONGEST_LABEL);
        whole.filter_map(|label| VolumeId::parse(label).ok())
    }
}
