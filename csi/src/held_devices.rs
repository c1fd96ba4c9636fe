//! Published loop devices, which this driver holds open.
//!
//! A pod may open the device of its Block volume, and so may unbind it: `LOOP_CLR_FD` needs no capability. The kernel does not
//! unbind a device that is open. If it did, the index of the device could be bound to the image of another volume, to which
//! the pod would then have access, because its containers keep the node.
//!
//! Nothing holds the devices while no driver runs. So a driver first opens the mounted devices again. The node of a device that
//! was unbound in the meantime stays mounted until the volume is unpublished, that is until its containers have ended, and
//! the library uses no index whose node is mounted.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use loopfs::DeviceNumber;
use loopfs::loop_device::{Access, BackingFile, LoopControl, LoopDevice};
use loopfs::mount::KnownMount;
use loopfs::volume_store::{VolumeId, VolumeKind, VolumeStore};

use crate::error::Result;
use crate::mounted_devices::MountedDevices;

/// The devices that are published, or that an interrupted call was about to publish.
#[derive(Debug, Default)]
pub(crate) struct HeldDevices(Mutex<Vec<Held>>);

#[derive(Debug)]
struct Held {
    /// `None` if an earlier driver published the device, and it is bound to no image now.
    volume: Option<VolumeId>,
    number: DeviceNumber,
    device: LoopDevice,
}

impl HeldDevices {
    /// Opens the mounted devices of the volumes, which an earlier driver has published.
    pub(crate) fn recover(store: &VolumeStore, mounts: &[KnownMount]) -> Result<Self> {
        let held = Self::default();
        let mut images = None;
        // A node can be mounted several times, by the driver and by the kubelet.
        let numbers: HashSet<_> = MountedDevices::among(mounts)?.numbers().collect();
        for number in numbers {
            let device = match LoopDevice::open_device_number(number) {
                Ok(device) => device,
                Err(error) => {
                    tracing::warn!(%number, %error, "a loop device is mounted below the kubelet directory and cannot be opened; delete \
                        the pods that use it");
                    continue;
                }
            };
            let backing = device.binding().backing;
            // Another driver may have published it.
            if !store.holds(&backing) {
                continue;
            }
            // The label would be faster. A pod can change it.
            let images = match &images {
                Some(images) => images,
                None => images.insert(images_of(store)?),
            };
            let volume = images.iter().find(|(_, image)| *image == backing).map(|(volume, _)| volume.clone());
            held.lock().push(Held { volume, number, device });
        }
        Ok(held)
    }

    /// Holds a device of a volume. Opens it for reading only, because udev examines devices that were open for writing.
    pub(crate) fn hold(&self, volume: &VolumeId, device: &LoopDevice) -> Result<()> {
        let (volume, number) = (Some(volume.clone()), device.device_number()?);
        // The same attachment, because `device` is open. A repair may have changed its binding.
        let device = LoopDevice::open_index(device.index())?;
        let mut held = self.lock();
        let earlier: Vec<Held> = held.extract_if(.., |held| held.number == number).collect();
        held.push(Held { volume, number, device });
        // Closing a device can wait for another process that uses it.
        drop(held);
        drop(earlier);
        Ok(())
    }

    /// Returns the numbers of the held devices of a volume, or of those of no volume.
    pub(crate) fn numbers(&self, volume: Option<&VolumeId>) -> Vec<DeviceNumber> {
        self.lock().iter().filter(|held| held.volume.as_ref() == volume).map(|held| held.number).collect()
    }

    /// Stops to hold a device, whose node must not be mounted any more. Returns the descriptor, which the caller closes.
    pub(crate) fn release(&self, number: DeviceNumber) -> Option<LoopDevice> {
        self.take(|held| held.number == number).map(|held| held.device)
    }

    /// Stops to hold the devices of a volume whose nodes are mounted nowhere, without detaching them.
    pub(crate) fn release_unmounted(&self, volume: &VolumeId, mounted: &MountedDevices) {
        let numbers =
            self.numbers(Some(volume)).into_iter().filter(|number| mounted.find(*number, None).is_none());
        numbers.for_each(|number| drop(self.release(number)));
    }

    /// Stops to hold a device of `volume`, or of no volume, whose node is mounted nowhere, and detaches it unless it is bound to `image`.
    /// Does nothing if the device is not held for it: the number may be that of another volume by now.
    pub(crate) fn close(
        &self,
        number: DeviceNumber,
        volume: Option<&VolumeId>,
        image: Option<BackingFile>,
        loops: &LoopControl,
    ) -> Result<()> {
        let is_meant = |held: &Held| held.number == number && held.volume.as_ref() == volume;
        let Some(taken) = self.take(is_meant) else { return Ok(()) };
        // Opened before it is closed, so that it is the same attachment.
        let device = LoopDevice::open_device_number(number);
        drop(taken.device);
        // Otherwise a process has unbound it.
        let Ok(device) = device else { return Ok(()) };
        if Some(device.binding().backing) == image {
            return Ok(());
        }
        let detached = loops.detach(device);
        if detached.is_err()
            && let Ok(device) = LoopDevice::open_device_number(number)
        {
            // The next cleanup finds it again.
            self.lock().push(Held { volume: taken.volume, number, device });
        }
        detached.map(drop).map_err(Into::into)
    }

    /// Takes a device out of the list. The caller closes it without the lock, because that can wait for another process.
    fn take(&self, is_meant: impl Fn(&Held) -> bool) -> Option<Held> {
        let mut held = self.lock();
        let position = held.iter().position(is_meant)?;
        Some(held.swap_remove(position))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Held>> {
        // A panic leaves the list consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the images of the Block volumes, without those that cannot be opened.
fn images_of(store: &VolumeStore) -> Result<Vec<(VolumeId, BackingFile)>> {
    let image = |id: VolumeId| {
        let volume = store.volume(&id).ok().filter(|volume| volume.kind() == VolumeKind::Block)?;
        let image = volume.open_image(Access::ReadOnly).and_then(BackingFile::of).ok()?;
        Some((id, image))
    };
    Ok(store.list()?.into_iter().filter_map(image).collect())
}
