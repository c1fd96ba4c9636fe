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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use loopfs::loop_device::{BackingFile, LoopControl, LoopDevice, query_device, query_devices};
use loopfs::mount::KnownMount;
use loopfs::volume_store::{VolumeId, VolumeStore};
use loopfs::{DeviceNumber, ErrorKind};

use crate::driver::DriverName;
use crate::error::Result;
use crate::kubelet_record::KubeletRecord;
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
    /// does. Another driver of the node can have the same range of indices, so devices that the kubelet has recorded as another driver's
    /// are left alone: the kernel would not detach them while they are open here.
    ///
    /// The label of a device would name its volume, but a pod can change it. So its volume is the one whose image it is bound to, or the
    /// one that the kubelet has recorded. Without either, the first call for the target of the volume tells ([`assign`](Self::assign)).
    pub(crate) fn recover(
        driver: &DriverName,
        store: &VolumeStore,
        loops: &LoopControl,
        mounts: &[KnownMount],
    ) -> Result<Arc<Self>> {
        let held = Arc::new(Self::default());
        // A node can be mounted several times, by the driver and by the kubelet.
        let mut records: HashMap<DeviceNumber, Option<KubeletRecord>> = HashMap::new();
        for (mount_point, number) in MountedDevices::among(mounts)?.mount_points() {
            let record = records.entry(number).or_default();
            if record.is_none() {
                *record = KubeletRecord::read(mount_point);
            }
        }
        records.retain(|_, record| record.as_ref().is_none_or(|record| record.is_of(driver)));
        if records.is_empty() {
            return Ok(held);
        }
        let numbers = records.keys().copied().collect();
        let in_range = records.keys().copied().filter(|number| loops.has(*number)).collect();
        let recovery =
            Arc::new(Recovery { held: Arc::clone(&held), images: store.images()?, records, in_range });
        // It also holds a device that does not respond in time.
        for (number, opened) in query_devices(numbers, move |number| recovery.hold(number)) {
            if let Err(error) = opened {
                tracing::warn!(%number, %error, "a loop device is mounted below the kubelet directory and cannot be opened; delete \
                    the pods that use it");
            }
        }
        Ok(held)
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
        let index = device.index();
        let device = query_device(number, move |_| LoopDevice::open_index(index))?;
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
    /// A device of no volume may be another driver's, so it is detached only if its file is in the store. Does nothing if the device is
    /// not held for `volume`: the number may be that of another volume by now.
    pub(crate) fn close(
        &self,
        number: DeviceNumber,
        volume: Option<&VolumeId>,
        image: Option<BackingFile>,
        store: &VolumeStore,
        loops: &LoopControl,
    ) -> Result<()> {
        let is_meant = |held: &Held| held.number == number && held.volume.as_ref() == volume;
        let Some(taken) = self.take(is_meant) else { return Ok(()) };
        // Opened before it is closed, so that it is the same attachment.
        match query_device(number, LoopDevice::open_device_number) {
            Ok(device) => {
                drop(taken.device);
                let backing = device.binding().backing;
                if Some(backing) == image || volume.is_none() && !store.holds(&backing) {
                    return Ok(());
                }
                let detached = loops.detach(device);
                if detached.is_err()
                    && let Ok(device) = query_device(number, LoopDevice::open_device_number)
                {
                    // The next cleanup finds it again.
                    self.lock().push(Held { volume: taken.volume, number, device });
                }
                detached.map(drop).map_err(Into::into)
            }
            // A process has unbound it.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) if error.kind() == ErrorKind::Busy || volume.is_none() => {
                self.lock().push(taken);
                Err(error.into())
            }
            // The server of its file has ended, for example, so that the device cannot be opened again with its status.
            Err(_) => {
                let copy = taken.device.try_clone()?;
                let detached = loops.detach(taken.device);
                if detached.is_err() {
                    self.lock().push(Held { device: copy, ..taken });
                }
                detached.map(drop).map_err(Into::into)
            }
        }
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

/// The devices that an earlier driver may have published.
struct Recovery {
    held: Arc<HeldDevices>,
    images: HashMap<BackingFile, VolumeId>,
    /// The kubelet's record of each of them, if there is one.
    records: HashMap<DeviceNumber, Option<KubeletRecord>>,
    /// Those in the range of this driver. A device of another program that was bound to the image already is in none.
    in_range: HashSet<DeviceNumber>,
}

impl Recovery {
    fn hold(&self, number: DeviceNumber) -> loopfs::Result<()> {
        let device = LoopDevice::open_device_number(number)?;
        let record = self.records.get(&number).and_then(Option::as_ref);
        let backing = device.binding().backing;
        let of_image = self.images.get(&backing).cloned();
        if of_image.is_none() && record.is_none() && !self.in_range.contains(&number) {
            return Ok(());
        }
        if of_image.is_none() {
            tracing::warn!(%number, file = %backing, "a loop device is mounted below the kubelet directory and bound to a file that is the \
                image of no volume; delete the pods that use it");
        }
        let volume = of_image.or_else(|| record?.volume());
        let mut held = self.held.lock();
        // A call may have published it in the meantime.
        if held.iter().all(|held| held.number != number) {
            held.push(Held { volume, number, device });
        }
        Ok(())
    }
}
