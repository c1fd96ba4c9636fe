//! Publishing and unpublishing volumes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::block::{self, BlockVolume, Cleanup};
use super::devices::{PublishOptions, PublishedDevices};
use super::directory::Directory;
use super::locks::Object;
use super::mounted::MountedDevices;
use super::stale::StaleDevice;
use super::target::{ClearedTarget, PublishRoot, Target};
use crate::Bytes;
use crate::error::{Error, ErrorKind, Result};
use crate::loop_device::{Access, Detach, LoopControl, LoopDevice};
use crate::mount::{KnownMount, MountFlags};
use crate::volume_store::{
    AbnormalReason, Condition, Volume, VolumeId, VolumeKind, VolumeStats, VolumeStore,
};

/// Publishes the volumes of a store below a directory.
///
/// Each call reads the current state from the store, the mount table and the loop devices. It therefore works alike after
/// a restart of the process, and can be repeated. Calls that change one volume wait for each other.
///
/// A volume is published by one publisher at a time, and targets of one directory by one. What is published is protected from the
/// programs that use it for as long as the publisher exists: drop it after the last volume was unpublished, or start the process again soon.
#[derive(Debug)]
pub struct Publisher {
    store: VolumeStore,
    devices: Arc<PublishedDevices>,
    root: Arc<PublishRoot>,
}

/// What is mounted at a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishMode {
    /// The directory of a Filesystem volume, mounted with exactly these flags.
    Directory(MountFlags),
    /// The node of the loop device of a Block volume.
    Device(Access),
}

impl PublishMode {
    fn kind(self) -> VolumeKind {
        match self {
            Self::Directory(_) => VolumeKind::Filesystem,
            Self::Device(_) => VolumeKind::Block,
        }
    }
}

/// How many targets a volume may have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Targets {
    One,
    Any,
}

/// A volume whose devices and records are to be removed.
enum Found {
    Block(Volume),
    /// A Filesystem volume, which has no loop devices.
    WithoutDevices,
    Deleted,
}

impl Publisher {
    /// Opens the devices that an earlier process has published below the root, so that no program can unbind them, and records which volumes
    /// are published. If a full or failed disk takes no record, that is only reported. Call [`PublishRoot::require_propagation`] before
    /// if others must see what is published.
    ///
    /// # Errors
    /// Those of reading the mount table and the store.
    pub fn open(
        store: VolumeStore,
        loops: LoopControl,
        root: Arc<PublishRoot>,
        options: PublishOptions,
    ) -> Result<Self> {
        if let Err(error) = store.sync_publications(root.path(), || root.mounts()) {
            let text = "could not record which volumes are published; a volume that is in use may be deleted";
            (options.report)(&format!("{text}: {error}"));
        }
        let devices = PublishedDevices::recover(&store, loops, &root.mounts()?, options)?;
        Ok(Self { store, devices, root })
    }

    /// Continues with a store that was opened again, for instance after its disk had failed. `devices` are those of the earlier publisher.
    #[must_use]
    pub fn reopened(store: VolumeStore, devices: Arc<PublishedDevices>, root: Arc<PublishRoot>) -> Self {
        Self { store, devices, root }
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &VolumeStore {
        &self.store
    }

    /// Returns the devices that this process holds.
    #[must_use]
    pub fn devices(&self) -> &Arc<PublishedDevices> {
        &self.devices
    }

    /// Returns the directory below which volumes are published.
    #[must_use]
    pub fn root(&self) -> &PublishRoot {
        &self.root
    }

    /// Attaches the device of a Block volume, so that publishing it takes less time. Publishing does the same if it is necessary. A
    /// device with the other access stays: [`publish`](Self::publish) decides about that.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is no such volume. [`ErrorKind::InvalidInput`]: it is a Filesystem volume. Those of
    /// [`LoopControl::attach`].
    pub fn attach(&self, id: &VolumeId, access: Access) -> Result<()> {
        let _lock = self.root.locks.lock(Object::Volume(id.clone()));
        let volume = self.volume(id, VolumeKind::Block)?;
        let block = self.block(&volume)?;
        if block.devices()?.iter().all(|device| device.binding().access == access) {
            self.attach_device(&volume, &block, access)?;
        }
        Ok(())
    }

    /// Detaches the devices of a volume that is published nowhere. Succeeds if there is none.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`]: the volume is published.
    pub fn detach(&self, id: &VolumeId) -> Result<Cleanup> {
        let _lock = self.root.locks.lock(Object::Volume(id.clone()));
        let volume = match self.find(id)? {
            Found::Block(volume) => volume,
            // If the storage was unavailable when the volume was unpublished, its publication record is removed here.
            Found::WithoutDevices => {
                self.sync_publication(id)?;
                return Ok(Cleanup::Complete);
            }
            Found::Deleted => {
                self.sync_publication(id)?;
                self.detach_stale_devices(id)?;
                return Ok(Cleanup::Complete);
            }
        };
        let block = self.block(&volume)?;
        self.require_unpublished("detach", id, block.published_at(&self.mounted()?, None)?)?;
        block.detach()
    }

    /// Publishes a volume at a target below the root, whose directory exists. Succeeds if it is published there in this way.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is no such volume. [`ErrorKind::InvalidInput`]: it is of the other kind, or the target leads outside.
    /// [`ErrorKind::AlreadyExists`]: it is published there in another way. [`ErrorKind::Conflict`]: something else is there, or the
    /// volume is published elsewhere with the other access or by another program. [`ErrorKind::Busy`]: a process has a device with the
    /// other access open. Those of [`LoopControl::attach`] and [`VolumeStore::record_publication`].
    pub fn publish(&self, id: &VolumeId, target: &Path, mode: PublishMode) -> Result<()> {
        self.publish_at(id, target, mode, Targets::Any)
    }

    /// As [`publish`](Self::publish), for a volume that may have one target at a time.
    ///
    /// # Errors
    /// Also [`ErrorKind::Conflict`] if it is published elsewhere.
    pub fn publish_only_at(&self, id: &VolumeId, target: &Path, mode: PublishMode) -> Result<()> {
        self.publish_at(id, target, mode, Targets::One)
    }

    fn publish_at(&self, id: &VolumeId, target: &Path, mode: PublishMode, targets: Targets) -> Result<()> {
        let _lock = self.root.locks.lock(Object::Volume(id.clone()));
        let volume = self.volume(id, mode.kind())?;
        let target = self.root.locate(target)?.ok_or_else(|| {
            Error::new(
                ErrorKind::Conflict,
                "publish at",
                target.display(),
                "the directory in which it would be does not exist; create it",
            )
        })?;
        match mode {
            PublishMode::Directory(flags) => {
                let directory = Directory::open(&volume)?;
                // Before the mount, because another process, which deletes volumes, may not see the mounts of this one.
                let record = || self.store.record_publication(id, self.root.path(), target.path());
                if directory.is_published(&target, flags)? {
                    return record();
                }
                directory.refuse_place_inside(&target)?;
                if targets == Targets::One {
                    refuse_second(id, directory.published_at(&self.root.mounts()?, Some(&target)))?;
                }
                record()?;
                let published = self.mount_at(&target, |target| directory.publish(target, flags));
                // A process that has started since may have found a record without a mount.
                let published = published.and_then(|()| record());
                if published.is_err() {
                    self.sync_publication(id)?;
                }
                published
            }
            PublishMode::Device(access) => {
                let block = self.block(&volume)?;
                if block.is_published(&target, access)? {
                    return Ok(());
                }
                let mounted = self.mounted()?;
                if targets == Targets::One {
                    refuse_second(id, block.published_at(&mounted, Some(&target))?)?;
                }
                block.detach_other_access(&mounted, access)?;
                let device = self.attach_device(&volume, &block, access)?;
                // Before the node is mounted, from when on it may reach another program.
                self.devices.hold(id, &device)?;
                self.mount_at(&target, |target| block::publish(&device, target))
            }
        }
    }

    /// Mounts at a target where nothing is mounted. Does not hold its lock for longer: [`PublishRoot::clear`] takes it, and must not wait for a
    /// disk that hangs.
    fn mount_at(&self, target: &Target, mount: impl FnOnce(&Target) -> Result<()>) -> Result<()> {
        let _lock = self.root.locks.lock(Object::Target(target.path().to_owned()));
        match target.mount()? {
            None => mount(target),
            Some(_) => {
                Err(target
                    .conflict("another call has published something there in the meantime; unpublish it"))
            }
        }
    }

    /// Unpublishes a volume from a target, and detaches its devices if it is published nowhere else. Succeeds if nothing is there, and if the
    /// volume was deleted. [`PublishRoot::clear`], which removes what any volume or program has there, and [`clean_up`](Self::clean_up)
    /// are its two parts.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`]: another volume or file system is mounted there. Those of its parts.
    pub fn unpublish(&self, id: &VolumeId, target: &Path) -> Result<Cleanup> {
        if let Some(target) = self.root.locate(target)? {
            self.refuse_other(id, &target)?;
        }
        let cleared = self.root.clear(target)?;
        self.clean_up(id, &cleared)
    }

    /// Detaches the devices of a volume and removes its publication record, if it is not published any more.
    ///
    /// Does so even if nothing was mounted at the target, because an earlier call may have ended between the unmount
    /// and the cleanup.
    ///
    /// # Errors
    /// Those of reading the store and of detaching devices. Repeat the call, and also after [`Cleanup::DetachDeferred`].
    pub fn clean_up(&self, id: &VolumeId, cleared: &ClearedTarget) -> Result<Cleanup> {
        let _lock = self.root.locks.lock(Object::Volume(id.clone()));
        self.close_orphans();
        let volume = match self.find(id)? {
            Found::Block(volume) => volume,
            Found::WithoutDevices => {
                self.sync_publication(id)?;
                return Ok(Cleanup::Complete);
            }
            Found::Deleted => {
                // Devices can be detached even if the disk accepts no writes.
                self.detach_stale_devices(id)?;
                self.sync_publication(id)?;
                return Ok(Cleanup::Complete);
            }
        };
        let block = self.block(&volume)?;
        let mounted = self.mounted()?;
        if let Some(status) = &cleared.status
            && let Some(stale) =
                StaleDevice::at_path(&self.store, &self.devices, id, Some(block.image()?), status)?
        {
            stale.detach(&self.devices, &mounted)?;
        }
        match block.published_at(&mounted, None)? {
            Some(_in_use) => Ok(Cleanup::Complete),
            None => block.detach(),
        }
    }

    /// Deletes a volume that is not published, also if its device is attached. Returns `false` if there is none.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`]: it is published. [`ErrorKind::Busy`]: another program uses its device. Those of
    /// [`VolumeStore::delete`].
    pub fn delete(&self, id: &VolumeId) -> Result<bool> {
        let _lock = self.root.locks.lock(Object::Volume(id.clone()));
        match self.store.volume(id) {
            Ok(volume) => {
                let mounts = self.root.mounts()?;
                let mounted = MountedDevices::among(&mounts)?;
                self.require_unpublished("delete", id, self.place_among(&volume, &mounts, &mounted)?)?;
                self.store.sync_publication(id, self.root.path(), &mounts)?;
                if volume.kind() == VolumeKind::Block {
                    self.detach_for_deletion(&self.block(&volume)?, id)?;
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        self.store.delete(id)
    }

    /// Returns a target at which the volume is published.
    ///
    /// # Errors
    /// Those of reading the mount table and of opening the volume.
    pub fn published_at(&self, volume: &Volume) -> Result<Option<PathBuf>> {
        let mounts = self.root.mounts()?;
        self.place_among(volume, &mounts, &MountedDevices::among(&mounts)?)
    }

    /// Returns `true` if the directory or a device of the volume is at the target, and `None` if nothing is there.
    ///
    /// # Errors
    /// Those of opening the volume and of stat(2).
    pub fn is_at(&self, volume: &Volume, target: &Target) -> Result<Option<bool>> {
        let Some(status) = target.status()? else { return Ok(None) };
        match volume.kind() {
            VolumeKind::Filesystem => Ok(Some(Directory::open(volume)?.matches(&status))),
            VolumeKind::Block => Ok(Some(self.block(volume)?.device_of(&status)?.is_some())),
        }
    }

    /// Returns the use, capacity and condition of a volume, of which that of its devices is a part.
    ///
    /// # Errors
    /// Those of [`Volume::stats`] and of opening its devices.
    pub fn stats(&self, volume: &Volume) -> Result<VolumeStats> {
        let mut stats = volume.stats()?;
        // A changed device is the doing of its user, a lack of space is not.
        let is_intact = matches!(
            &stats.condition,
            Condition::Healthy | Condition::Abnormal { reason: AbnormalReason::SpaceTaken, .. }
        );
        if volume.kind() == VolumeKind::Block
            && is_intact
            && let Some(problem) = self.block(volume)?.problem()?
        {
            stats.condition = Condition::abnormal(AbnormalReason::DeviceChanged, problem);
        }
        Ok(stats)
    }

    /// Returns the use, capacity and condition of the volume at a target, and `None` if it is not published there. If a stale device of the
    /// volume is there, its condition says that the image was deleted or replaced.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is neither such a volume nor a device of it.
    pub fn stats_at(&self, id: &VolumeId, target: Option<&Target>) -> Result<Option<VolumeStats>> {
        let status = match target {
            Some(target) => target.status()?,
            None => None,
        };
        let volume = match (self.store.volume(id), &status) {
            (Ok(volume), _) => volume,
            // The volume was deleted, but its device may still be published.
            (Err(error), Some(status)) if error.kind() == ErrorKind::NotFound => {
                let stale = StaleDevice::at_path(&self.store, &self.devices, id, None, status)?;
                return Ok(Some(stale.ok_or(error)?.stats()));
            }
            (Err(error), _) => return Err(error),
        };
        let Some(status) = status else { return Ok(None) };
        match volume.kind() {
            VolumeKind::Filesystem if !Directory::open(&volume)?.matches(&status) => return Ok(None),
            VolumeKind::Filesystem => {}
            VolumeKind::Block => {
                let block = self.block(&volume)?;
                if block.device_of(&status)?.is_none() {
                    let stale =
                        StaleDevice::at_path(&self.store, &self.devices, id, Some(block.image()?), &status)?;
                    return Ok(stale.map(|stale| stale.stats()));
                }
            }
        }
        self.stats(&volume).map(Some)
    }

    /// Makes the devices of a Block volume as large as its image, and repairs what their users have changed. Records and returns the size
    /// that the volume has on this machine. [`VolumeStore::expand`] expands the volume itself.
    ///
    /// # Errors
    /// Those of opening the devices.
    pub fn refresh(&self, volume: &Volume) -> Result<Bytes> {
        let _lock = self.root.locks.lock(Object::Volume(volume.id().clone()));
        if volume.kind() == VolumeKind::Filesystem {
            return Ok(volume.capacity());
        }
        // Repairing a device can change its range, so it is opened again to be refreshed.
        self.block(volume)?.repair()?;
        self.refresh_and_record(volume)
    }

    /// As [`refresh`](Self::refresh), but returns `None` if the size was recorded already, repairs nothing, and waits for no other call: a
    /// larger size does no harm to a device that is being attached or detached. Attaching checks the size again at its end.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: a user has changed a device.
    pub fn refresh_expanded(&self, id: &VolumeId) -> Result<Option<Bytes>> {
        let volume = self.store.volume(id)?;
        let up_to_date = volume.kind() != VolumeKind::Block
            || volume.device_size()?.is_some_and(|known| known >= volume.capacity());
        if up_to_date {
            return Ok(None);
        }
        if let Some(change) = self.block(&volume)?.change()? {
            // A repair could cancel the detach of a concurrent call, so it needs the lock of the volume.
            let detail = format!("a process has changed its loop device: {change}");
            return Err(Error::new(ErrorKind::Busy, "refresh", id, detail));
        }
        self.refresh_and_record(&volume).map(Some)
    }

    /// Writes what the devices of a Block volume have cached.
    ///
    /// # Errors
    /// Those of opening the devices and of fsync(2).
    pub fn flush(&self, volume: &Volume) -> Result<()> {
        match volume.kind() {
            VolumeKind::Filesystem => Ok(()),
            VolumeKind::Block => self.block(volume)?.flush(),
        }
    }

    pub(super) fn block<'a>(&'a self, volume: &'a Volume) -> Result<BlockVolume<'a>> {
        BlockVolume::open(volume, &self.devices)
    }

    pub(super) fn place_among(
        &self,
        volume: &Volume,
        mounts: &[KnownMount],
        mounted: &MountedDevices,
    ) -> Result<Option<PathBuf>> {
        match volume.kind() {
            VolumeKind::Filesystem => Ok(Directory::open(volume)?.published_at(mounts, None)),
            VolumeKind::Block => self.block(volume)?.published_at(mounted, None),
        }
    }

    fn volume(&self, id: &VolumeId, requested: VolumeKind) -> Result<Volume> {
        let volume = self.store.volume(id)?;
        if volume.kind() == requested {
            return Ok(volume);
        }
        let detail = format!("it is a {} volume, but is used as a {requested} volume", volume.kind());
        Err(Error::new(ErrorKind::InvalidInput, "publish", id, detail))
    }

    fn find(&self, id: &VolumeId) -> Result<Found> {
        match self.store.volume(id) {
            Ok(volume) if volume.kind() == VolumeKind::Block => Ok(Found::Block(volume)),
            Ok(_directory) => Ok(Found::WithoutDevices),
            Err(error) => match error.kind() {
                ErrorKind::NotFound => Ok(Found::Deleted),
                // The store returns these errors only for directories: for one without limits, and for one without the
                // store's mark.
                ErrorKind::NotEnforced | ErrorKind::InvalidInput => Ok(Found::WithoutDevices),
                _ => Err(error),
            },
        }
    }

    fn require_unpublished(
        &self,
        operation: &'static str,
        id: &VolumeId,
        place: Option<PathBuf>,
    ) -> Result<()> {
        match place {
            None => Ok(()),
            Some(place) => Err(Error::new(
                ErrorKind::Conflict,
                operation,
                id,
                format!("it is still published at {}; unpublish it there first", place.display()),
            )),
        }
    }

    /// Detaches a device that no program uses, such as that of a process that has ended before it published the volume. A device whose
    /// detach was deferred already does not keep the volume.
    fn detach_for_deletion(&self, block: &BlockVolume<'_>, id: &VolumeId) -> Result<()> {
        let mut is_left = !self.devices.numbers(Some(id)).is_empty();
        if !is_left {
            let of_each: Result<Vec<_>> = block.devices()?.iter().map(LoopDevice::status).collect();
            is_left = of_each?.iter().all(|status| status.auto_clear);
        }
        if is_left {
            let _deferred = block.detach()?;
            return Ok(());
        }
        let Detach::Deferred(pending) = self.devices.loops().detach_all(block.image_file())? else {
            return Ok(());
        };
        let kept = pending.cancel()?;
        let Some(device) = kept.first() else { return Ok(()) };
        let detail = format!(
            "a program has {} open, which this one has not published; end it",
            device.path().display()
        );
        Err(Error::new(ErrorKind::Busy, "delete", id, detail))
    }

    /// Returns an error if the target shows another volume of this store, or what no volume shows.
    fn refuse_other(&self, id: &VolumeId, target: &Target) -> Result<()> {
        let Some(mount) = target.mount()? else { return Ok(()) };
        let other = match target.loop_device().ok().flatten() {
            Some(number) => match self.devices.volume_of(number) {
                Some(Some(volume)) if volume != *id => Some(format!("volume {volume}")),
                _ => None,
            },
            None if mount.device == self.store.device()? => match mount.root.strip_prefix("/volumes") {
                Ok(root) if !root.starts_with(id.as_str()) => Some(format!("volume {}", root.display())),
                _ => None,
            },
            None => Some(format!("a file system of the type {}", mount.fs_type)),
        };
        match other {
            None => Ok(()),
            Some(other) => Err(target.conflict(format!("it shows {other}, and not volume {id}"))),
        }
    }

    /// Closes the devices of no volume whose nodes are not mounted any more. An error is not one of the volume that is cleaned up.
    fn close_orphans(&self) {
        let orphans = self.devices.numbers(None);
        if orphans.is_empty() {
            return;
        }
        let closed = self.mounted().and_then(|mounted| {
            let unmounted = orphans.into_iter().filter(|number| mounted.find(*number, None).is_none());
            let close = |number| self.devices.close(number, None, None, &|file| self.store.holds(file));
            // All of them, also after an error.
            let closed: Vec<Result<()>> = unmounted.map(close).collect();
            closed.into_iter().collect::<Result<()>>()
        });
        if let Err(error) = closed {
            let text = "a loop device that an earlier process published could not be detached; the next cleanup retries";
            self.devices.report(&format!("{text}: {error}"));
        }
    }

    /// Records where the volume is published according to the mount table, or that it is not published.
    fn sync_publication(&self, volume: &VolumeId) -> Result<()> {
        self.store.sync_publication(volume, self.root.path(), &self.root.mounts()?)
    }

    /// Detaches the devices of a volume that was deleted while it was in use.
    fn detach_stale_devices(&self, volume: &VolumeId) -> Result<()> {
        let stale_devices = StaleDevice::all_for_deleted(&self.store, &self.devices, volume)?;
        if stale_devices.is_empty() {
            return Ok(());
        }
        let mounted = self.mounted()?;
        stale_devices.iter().try_for_each(|stale| stale.detach(&self.devices, &mounted))
    }

    /// Attaches the volume's device, or returns the device if it is attached already and cancels its deferred detach. Detaches
    /// it again if the volume was deleted in the meantime. Once the device is attached, deleting the volume is refused.
    ///
    /// Publishing calls this always, and keeps the device open until its node is mounted. It cannot rely on an earlier
    /// [`attach`](Self::attach): the device does not survive a reboot, and another access or an unpublish call may have detached it.
    fn attach_device(&self, volume: &Volume, block: &BlockVolume<'_>, access: Access) -> Result<LoopDevice> {
        let device = block.attach(access)?;
        let present = match self.store.volume(volume.id()) {
            Ok(present) => self.block(&present)?.image()? == block.image()?,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        if present {
            return Ok(device);
        }
        // The kernel would defer the detach of an open device.
        drop(device);
        // A program that uses the volume may still run, and has the node of the device.
        if block.published_at(&self.mounted()?, None)?.is_none() {
            // A deferred detach does not keep the image, which was deleted.
            let _deferred = block.detach()?;
        }
        // Returns the same error as later calls, if the volume was deleted.
        self.store.volume(volume.id()).map(drop)?;
        let detail = "it was replaced while its device was attached; retry";
        Err(Error::new(ErrorKind::Conflict, "attach", volume.id(), detail))
    }

    fn refresh_and_record(&self, volume: &Volume) -> Result<Bytes> {
        let size = self.block(volume)?.expand()?;
        volume.record_device_size(size)?;
        Ok(size)
    }

    fn mounted(&self) -> Result<MountedDevices> {
        MountedDevices::among(&self.root.mounts()?)
    }
}

fn refuse_second(id: &VolumeId, other: Option<PathBuf>) -> Result<()> {
    match other {
        None => Ok(()),
        Some(other) => Err(Error::new(
            ErrorKind::Conflict,
            "publish",
            id,
            format!(
                "it is published at {}, but may have only one target at a time; unpublish it there first",
                other.display()
            ),
        )),
    }
}
