//! Published loop devices, which this driver holds open.
//!
//! A pod may open the device of its Block volume, and so may unbind it: `LOOP_CLR_FD` needs no capability. The kernel does not
//! unbind a device that is open. If it did, the index of the device could be bound to the image of another volume, to which
//! the pod would then have access, because its containers keep the node.
//!
//! Nothing holds the devices while no driver runs. So a driver first opens the mounted devices again. The node of a device that
//! was unbound in the meantime stays mounted until the volume is unpublished, that is until its containers have ended, and
//! the library uses no index whose node is mounted.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use loopfs::loop_device::{Access, BackingFile, LoopControl, LoopDevice, query_devices};
use loopfs::mount::KnownMount;
use loopfs::volume_store::{VolumeId, VolumeKind, VolumeStore};
use loopfs::{DeviceNumber, ErrorKind};

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
    /// Opens the mounted devices of the volumes, which an earlier driver has published. A device that does not respond is held as soon as it
    /// does.
    ///
    /// The label of a device would name its volume, but a pod can change it. So its volume is the one whose image it is bound to. If a
    /// pod has bound it to another file, the first call for the target of the volume tells ([`assign`](Self::assign)).
    pub(crate) fn recover(
        store: &VolumeStore,
        loops: &LoopControl,
        mounts: &[KnownMount],
    ) -> Result<Arc<Self>> {
        let held = Arc::new(Self::default());
        // A node can be mounted several times, by the driver and by the kubelet. Other drivers mount other nodes.
        let numbers: HashSet<_> =
            MountedDevices::among(mounts)?.numbers().filter(|number| loops.has(*number)).collect();
        if numbers.is_empty() {
            return Ok(held);
        }
        let images = Arc::new(Images::of(store)?);
        for (number, opened) in query_devices(numbers.into_iter().collect(), LoopDevice::open_device_number) {
            match opened {
                Ok(device) => held.add_recovered(number, device, &images),
                Err(error) => {
                    tracing::warn!(%number, %error, "a loop device is mounted below the kubelet directory and cannot be opened; delete \
                        the pods that use it");
                    if error.kind() == ErrorKind::Busy {
                        let (held, images) = (Arc::clone(&held), Arc::clone(&images));
                        let hold = move || {
                            if let Ok(device) = LoopDevice::open_device_number(number) {
                                held.add_recovered(number, device, &images);
                            }
                        };
                        // If no thread can be created, the next publication holds the device. Its index stays unused in the meantime.
                        std::thread::Builder::new().name("hold-device".to_owned()).spawn(hold).ok();
                    }
                }
            }
        }
        Ok(held)
    }

    fn add_recovered(&self, number: DeviceNumber, device: LoopDevice, images: &Images) {
        let backing = device.binding().backing;
        let volume = images.volume(backing).cloned();
        // A pod can choose such a name, too. Then its device stays attached, as a device of its own would.
        if volume.is_none() && backing.device != images.filesystem && names_a_volume(number) {
            // That of another driver with another disk, which must not be detached here.
            return;
        }
        if volume.is_none() {
            tracing::warn!(%number, file = %backing, "a loop device is mounted below the kubelet directory and bound to a file that is the \
                image of no volume; delete the pods that use it, after which it is detached");
        }
        let mut held = self.lock();
        // A call may have published it in the meantime.
        if held.iter().all(|held| held.number != number) {
            held.push(Held { volume, number, device });
        }
    }

    /// Records the volume of a device, if it is held for none: the kubelet has the volume published at a target that shows the device.
    pub(crate) fn assign(&self, number: DeviceNumber, volume: &VolumeId) {
        let mut held = self.lock();
        if let Some(held) = held.iter_mut().find(|held| held.number == number && held.volume.is_none()) {
            held.volume = Some(volume.clone());
        }
    }

    /// Returns the volume of a held device, `Some(None)` if it is held for none, and `None` if it is not held.
    pub(crate) fn volume_of(&self, number: DeviceNumber) -> Option<Option<VolumeId>> {
        self.lock().iter().find(|held| held.number == number).map(|held| held.volume.clone())
    }

    /// Returns all held devices with their volumes.
    pub(crate) fn all(&self) -> Vec<(DeviceNumber, Option<VolumeId>)> {
        self.lock().iter().map(|held| (held.number, held.volume.clone())).collect()
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

/// The images of the Block volumes, without those that cannot be opened.
#[derive(Debug)]
pub(crate) struct Images {
    volumes: HashMap<BackingFile, VolumeId>,
    filesystem: DeviceNumber,
}

impl Images {
    /// Opens all images.
    pub(crate) fn of(store: &VolumeStore) -> Result<Self> {
        let image = |id: VolumeId| {
            let volume = store.volume(&id).ok().filter(|volume| volume.kind() == VolumeKind::Block)?;
            let image = volume.open_image(Access::ReadOnly).and_then(BackingFile::of).ok()?;
            Some((image, id))
        };
        let volumes = store.list()?.into_iter().filter_map(image).collect();
        Ok(Self { volumes, filesystem: store.device()? })
    }

    /// Returns the volume of an image.
    pub(crate) fn volume(&self, image: BackingFile) -> Option<&VolumeId> {
        self.volumes.get(&image)
    }
}

/// Returns `true` if the file of a device is named as a volume of a store, of whichever driver.
fn names_a_volume(number: DeviceNumber) -> bool {
    let path = std::fs::read_to_string(format!("/sys/dev/block/{number}/loop/backing_file"));
    path.is_ok_and(|path| Path::new(&path).parent().is_some_and(|parent| parent.ends_with("volumes")))
}

/// Returns an error if one of these devices does not respond. A call that waited for it would keep its thread for as long.
pub(crate) fn require_response(numbers: Vec<DeviceNumber>) -> Result<()> {
    let status = |number| LoopDevice::open_device_number(number).and_then(|device| device.status());
    for (_, status) in query_devices(numbers, status) {
        match status {
            Err(error) if error.kind() == ErrorKind::Busy => return Err(error.into()),
            // Other errors are those of the call that follows.
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}
