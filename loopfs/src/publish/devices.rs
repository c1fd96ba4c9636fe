//! Published loop devices, which this process holds open.
//!
//! A program that has the node of a device may open it, and so may unbind it: `LOOP_CLR_FD` needs no capability. The kernel does not
//! unbind a device that is open. If it did, the index of the device could be bound to the image of another volume, to which
//! the program would then have access, because it keeps the node.
//!
//! Nothing holds the devices while no process that publishes runs. So such a process first opens the mounted devices again. The node of a
//! device that was unbound in the meantime stays mounted until the volume is unpublished, that is until its users have ended, and
//! no index is used whose node is mounted.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::cleanup::Cleanup;
use super::mounted::MountedDevices;
use super::target::PublishRoot;
use crate::DeviceNumber;
use crate::error::{ErrorKind, Result};
use crate::loop_device::{BackingFile, LoopControl, LoopDevice, query_device, query_devices};
use crate::mount::KnownMount;
use crate::volume_store::{VolumeId, VolumeStore};

/// The devices that are published, or that an interrupted call was about to publish.
pub struct PublishedDevices {
    loops: LoopControl,
    report: Box<dyn Fn(&str) + Send + Sync>,
    held: Mutex<Vec<Held>>,
}

/// What is known of a loop device that is mounted below the root when a process starts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Owner {
    /// Nothing. The device is held if it is bound to the image of a volume, or is in the range of indices of this process.
    Unknown,
    /// It belongs to another program, so it is left alone.
    OtherProgram,
    /// This program published it, as the device of this volume if that is known.
    ThisProgram(Option<VolumeId>),
}

#[derive(Debug)]
struct Held {
    /// `None` if an earlier process published the device, and it is bound to no image now.
    volume: Option<VolumeId>,
    number: DeviceNumber,
    device: LoopDevice,
}

/// Options of [`Publisher::open`](super::Publisher::open).
pub struct PublishOptions {
    owner: Box<dyn Fn(&Path) -> Owner>,
    pub(super) report: Box<dyn Fn(&str) + Send + Sync>,
}

impl Default for PublishOptions {
    /// The owner of each mounted device is unknown, and reports are dropped.
    fn default() -> Self {
        Self { owner: Box::new(|_mount_point| Owner::Unknown), report: Box::new(|_note| {}) }
    }
}

impl PublishOptions {
    /// `owner` tells what is known of a loop device that is mounted at a path, for instance by the records of an orchestrator. It is needed
    /// if other programs mount loop devices below the same directory.
    #[must_use]
    pub fn owner(self, owner: impl Fn(&Path) -> Owner + 'static) -> Self {
        Self { owner: Box::new(owner), ..self }
    }

    /// `report` is called with what an administrator may want to know although no call fails, such as that a device was repaired which its
    /// user had changed: with a sentence for a log.
    #[must_use]
    pub fn report(self, report: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self { report: Box::new(report), ..self }
    }
}

impl fmt::Debug for PublishOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublishOptions").finish_non_exhaustive()
    }
}

impl fmt::Debug for PublishedDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublishedDevices").field("held", &self.held).finish_non_exhaustive()
    }
}

impl PublishedDevices {
    /// Opens the mounted devices of the volumes, which an earlier process has published. A device that does not respond is held as soon as
    /// it does. Another program can have the same range of indices, so devices that `owner` tells to be another program's are left alone:
    /// the kernel would not detach them while they are open here.
    ///
    /// The label of a device would name its volume, but a program that has the device can change it. So its volume is the one whose image
    /// it is bound to, or the one that `owner` tells. Without either, the first call for the target of the volume tells
    /// ([`assign`](Self::assign)).
    pub(super) fn recover(
        store: &VolumeStore,
        loops: LoopControl,
        mounts: &[KnownMount],
        options: PublishOptions,
    ) -> Result<Arc<Self>> {
        let PublishOptions { owner, report } = options;
        let devices = Arc::new(Self { loops, report, held: Mutex::default() });
        // A node can be mounted several times, by this program and by an orchestrator.
        let mut owners: HashMap<DeviceNumber, Owner> = HashMap::new();
        for (mount_point, number) in MountedDevices::among(mounts)?.mount_points() {
            let known = owners.entry(number).or_insert(Owner::Unknown);
            if *known == Owner::Unknown {
                *known = owner(mount_point);
            }
        }
        owners.retain(|_, owner| *owner != Owner::OtherProgram);
        if owners.is_empty() {
            return Ok(devices);
        }
        let numbers = owners.keys().copied().collect();
        let in_range = owners.keys().copied().filter(|number| devices.loops.has(*number)).collect();
        let recovery =
            Arc::new(Recovery { devices: Arc::clone(&devices), images: store.images()?, owners, in_range });
        // It also holds a device that does not respond in time.
        for (number, opened) in query_devices(numbers, move |number| recovery.hold(number)) {
            if let Err(error) = opened {
                devices.report(&format!("a loop device, {number}, is mounted and cannot be opened; end the workloads that use it: {error}"));
            }
        }
        Ok(devices)
    }

    pub(super) fn report(&self, note: &str) {
        (self.report)(note);
    }

    /// Returns the loop driver.
    #[must_use]
    pub fn loops(&self) -> &LoopControl {
        &self.loops
    }

    /// Records the volume of a device, if it is held for none: the volume is published at a target that shows the device.
    pub(super) fn assign(&self, number: DeviceNumber, volume: &VolumeId) {
        let mut held = self.lock();
        if let Some(held) = held.iter_mut().find(|held| held.number == number && held.volume.is_none()) {
            held.volume = Some(volume.clone());
        }
    }

    /// Returns the volume of a held device, `Some(None)` if it is held for none, and `None` if it is not held.
    #[must_use]
    pub fn volume_of(&self, number: DeviceNumber) -> Option<Option<VolumeId>> {
        self.lock().iter().find(|held| held.number == number).map(|held| held.volume.clone())
    }

    /// Returns all held devices with their volumes.
    pub(super) fn all(&self) -> Vec<(DeviceNumber, Option<VolumeId>)> {
        self.lock().iter().map(|held| (held.number, held.volume.clone())).collect()
    }

    /// Holds a device of a volume. Opens it for reading only, because udev examines devices that were open for writing.
    pub(super) fn hold(&self, volume: &VolumeId, device: &LoopDevice) -> Result<()> {
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
    pub(super) fn numbers(&self, volume: Option<&VolumeId>) -> Vec<DeviceNumber> {
        self.lock().iter().filter(|held| held.volume.as_ref() == volume).map(|held| held.number).collect()
    }

    /// Stops to hold a device, whose node must not be mounted any more. Returns the descriptor, which the caller closes.
    pub(super) fn release(&self, number: DeviceNumber) -> Option<LoopDevice> {
        self.take(|held| held.number == number).map(|held| held.device)
    }

    /// Stops to hold the devices of a volume whose nodes are mounted nowhere below the root, without detaching them.
    ///
    /// # Errors
    /// Those of reading the nodes that are mounted.
    pub fn release_unmounted(&self, volume: &VolumeId, root: &PublishRoot) -> Result<()> {
        let mounted = MountedDevices::among(&root.mounts()?)?;
        let numbers =
            self.numbers(Some(volume)).into_iter().filter(|number| mounted.find(*number, None).is_none());
        numbers.for_each(|number| drop(self.release(number)));
        Ok(())
    }

    /// Stops to hold a device of `volume`, or of no volume, whose node is mounted nowhere, and detaches it unless it is bound to `image`.
    /// A device of no volume may be another program's, so it is detached only if its file is in the store. Does nothing if the device is
    /// not held for `volume`: the number may be that of another volume by now.
    pub(super) fn close(
        &self,
        number: DeviceNumber,
        volume: Option<&VolumeId>,
        image: Option<BackingFile>,
        in_store: &dyn Fn(&BackingFile) -> bool,
    ) -> Result<Cleanup> {
        let is_meant = |held: &Held| held.number == number && held.volume.as_ref() == volume;
        let Some(taken) = self.take(is_meant) else { return Ok(Cleanup::Complete) };
        // Opened before it is closed, so that it is the same attachment.
        match query_device(number, LoopDevice::open_device_number) {
            Ok(device) => {
                drop(taken.device);
                let backing = device.binding().backing;
                if Some(backing) == image || volume.is_none() && !in_store(&backing) {
                    return Ok(Cleanup::Complete);
                }
                self.detach_taken(Held { device, ..taken })
            }
            // A process has unbound it.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Cleanup::Complete),
            Err(error) if error.kind() == ErrorKind::Busy || volume.is_none() => {
                self.lock().push(taken);
                Err(error)
            }
            // The server of its file has ended, for example, so that the device cannot be opened again with its status.
            Err(_) => self.detach_taken(taken),
        }
    }

    /// Detaches a device that was taken out of the list. If that fails, it is in the list again, so that the next cleanup finds it.
    fn detach_taken(&self, Held { volume, number, device }: Held) -> Result<Cleanup> {
        let failed = match self.loops.detach(device) {
            Ok(detach) => return Ok(detach.into()),
            Err(failed) => failed,
        };
        let (device, error) = failed.into_parts();
        if error.kind() == ErrorKind::NotFound {
            return Ok(Cleanup::Complete);
        }
        self.lock().push(Held { volume, number, device });
        Err(error)
    }

    /// Takes a device out of the list. The caller closes it without the lock, because that can wait for another process.
    fn take(&self, is_meant: impl Fn(&Held) -> bool) -> Option<Held> {
        let mut held = self.lock();
        let position = held.iter().position(is_meant)?;
        Some(held.swap_remove(position))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Held>> {
        // A panic leaves the list consistent.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The devices that an earlier process may have published.
struct Recovery {
    devices: Arc<PublishedDevices>,
    images: HashMap<BackingFile, VolumeId>,
    owners: HashMap<DeviceNumber, Owner>,
    /// Those in the range of this process. A device of another program that was bound to the image already is in none.
    in_range: HashSet<DeviceNumber>,
}

impl Recovery {
    fn hold(&self, number: DeviceNumber) -> Result<()> {
        let device = LoopDevice::open_device_number(number)?;
        let of_this_program = match self.owners.get(&number) {
            Some(Owner::ThisProgram(volume)) => Some(volume.clone()),
            _ => None,
        };
        let backing = device.binding().backing;
        let of_image = self.images.get(&backing).cloned();
        if of_image.is_none() && of_this_program.is_none() && !self.in_range.contains(&number) {
            return Ok(());
        }
        if of_image.is_none() {
            self.devices.report(&format!(
                "a loop device, {number}, is mounted and bound to a file that is the image of no volume ({backing}); end the workloads \
                 that use it"
            ));
        }
        let volume = of_image.or(of_this_program.flatten());
        let mut held = self.devices.lock();
        // A call may have published it in the meantime.
        if held.iter().all(|held| held.number != number) {
            held.push(Held { volume, number, device });
        }
        Ok(())
    }
}
