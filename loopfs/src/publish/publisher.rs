//! Publishing and unpublishing volumes.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::stat::FileStat;

use super::block::{self, BlockVolume};
use super::cleanup::Cleanup;
use super::devices::{PublishOptions, PublishedDevices};
use super::directory::Directory;
use super::stale::StaleDevice;
use super::target::{ClearedTarget, PublishRoot, Target};
use crate::error::{Error, ErrorKind, Result};
use crate::loop_device::{Access, BackingFile, Detach, LoopControl, LoopDevice};
use crate::mount::MountFlags;
use crate::volume_store::{ContentSource, Volume, VolumeId, VolumeKind, VolumeStore};

/// Publishes the volumes of a store below a directory.
///
/// Each call reads the current state from the store, the mount table and the loop devices. It therefore works alike after
/// a restart of the process, and can be repeated. Calls that change one volume wait for each other.
///
/// The publisher holds each published device open, so that the program that uses the device cannot unbind it. Drop the publisher after
/// the last volume was unpublished, or open the next one soon. Delete and expand volumes by it, and not by its
/// [`store`](Self::store) alone.
///
/// # Several processes
/// Each has a root of its own: two publishers of one root would take the targets of each other. A Filesystem volume is published below one
/// root at a time, by a record that holds in all mount namespaces. The device of a Block volume can be published below several. It
/// is neither detached nor deleted while its node is mounted anywhere in the mount namespace of the caller.
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
        let loops = loops.for_untrusted_programs();
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
        let _lock = self.root.volume_locks.lock(id.clone());
        let volume = self.volume("attach", id, VolumeKind::Block)?;
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
        let _lock = self.root.volume_locks.lock(id.clone());
        let volume = match self.block_or_clean_up(id)? {
            ControlFlow::Break(cleanup) => return Ok(cleanup),
            ControlFlow::Continue(volume) => volume,
        };
        let block = self.block(&volume)?;
        self.require_unpublished("detach", id, block.published_at(&self.root.mounted_devices()?, None)?)?;
        block.detach()
    }

    /// Publishes a volume at a target below the root. Creates the target as an empty file or directory, if its parent directory exists.
    /// Succeeds if the volume is published there in this way.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is no such volume. [`ErrorKind::InvalidInput`]: it is of the other kind, or the target leads outside.
    /// [`ErrorKind::AlreadyExists`]: it is published there in another way. [`ErrorKind::Conflict`]: something else is there, or the
    /// volume is published elsewhere with the other access or, if it is a Filesystem volume, below another root.
    /// [`ErrorKind::Busy`]: a process has a device with the other access open. Those of [`LoopControl::attach`] and [`VolumeStore::record_publication`].
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
        let _lock = self.root.volume_locks.lock(id.clone());
        let volume = self.volume("publish", id, mode.kind())?;
        self.store.confirm_before_use(&volume)?;
        let target = self.root.locate(target)?.ok_or_else(|| {
            Error::new(
                ErrorKind::Conflict,
                "publish at",
                target.display(),
                "the directory in which it would be does not exist",
            )
            .with_remedy("create it")
        })?;
        match mode {
            PublishMode::Directory(flags) => {
                let directory = Directory::open(&volume)?;
                // Before the mount, because another process, which deletes volumes, may not see the mounts of this one.
                let record = || self.store.record_publication(id, self.root.path(), target.path());
                if directory.is_published(&target, flags)? {
                    return record();
                }
                self.refuse_place_in_store(&target)?;
                if targets == Targets::One {
                    refuse_second(id, directory.published_at(&self.root.mounts()?, Some(&target)))?;
                }
                record()?;
                let published = self.mount_at(&target, |target| {
                    directory.publish(target, flags)?;
                    // A process that has started since may have found a record without a mount, and removed it.
                    record().inspect_err(|_| drop(target.unmount().and_then(|_| target.remove())))
                });
                if published.is_err() {
                    // The first error says more than one of this.
                    self.sync_publication(id).ok();
                }
                published
            }
            PublishMode::Device(access) => {
                let block = self.block(&volume)?;
                if block.is_published(&target, access)? {
                    // A process may have ended before it refreshed the device of an expanded volume.
                    return block.expand().map(drop);
                }
                self.refuse_place_in_store(&target)?;
                let mounted = self.root.mounted_devices()?;
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
        let _lock = self.root.target_locks.lock(target.path().to_owned());
        match target.mount()? {
            None => mount(target),
            Some(_) => Err(target
                .conflict("another call has published something there in the meantime")
                .with_remedy("unpublish it")),
        }
    }

    /// Unpublishes a volume from a target, and detaches its devices if it is published nowhere else. Succeeds if nothing is there, and if the
    /// volume was deleted. [`PublishRoot::clear`], which removes what any volume or program has there, and [`clean_up`](Self::clean_up)
    /// are its two parts.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`]: another volume or file system is mounted there. Those of its parts.
    pub fn unpublish(&self, id: &VolumeId, target: &Path) -> Result<Cleanup> {
        let mut is_other = false;
        let cleared = self
            .root
            .clear_if(target, |target| self.refuse_other(id, target).inspect_err(|_| is_other = true));
        if is_other {
            return cleared.map(|_| Cleanup::Complete);
        }
        let cleaned = self.clean_up(id, cleared.as_ref().unwrap_or(&ClearedTarget::default()));
        cleared.and(cleaned)
    }

    /// Detaches the devices of a volume and removes its publication record, if it is not published any more.
    ///
    /// Does so even if nothing was mounted at the target, because an earlier call may have ended between the unmount
    /// and the cleanup.
    ///
    /// # Errors
    /// Those of reading the store and of detaching devices. Repeat the call, and also after [`Cleanup::DetachDeferred`].
    pub fn clean_up(&self, id: &VolumeId, cleared: &ClearedTarget) -> Result<Cleanup> {
        let _lock = self.root.volume_locks.lock(id.clone());
        self.close_orphans();
        let volume = match self.block_or_clean_up(id)? {
            ControlFlow::Break(cleanup) => return Ok(cleanup),
            ControlFlow::Continue(volume) => volume,
        };
        let block = self.block(&volume)?;
        let mounted = self.root.mounted_devices()?;
        let mut cleanup = Cleanup::Complete;
        if let Some(status) = &cleared.status
            && let Some(stale) = self.stale_at(id, Some(block.image()?), status)?
        {
            cleanup = stale.detach(&self.devices, &mounted)?;
        }
        match block.published_at(&mounted, None)? {
            Some(in_use) => {
                if !in_use.starts_with(self.root.path()) {
                    let place = in_use.display();
                    self.devices.report(&format!(
                        "volume {id} is still mounted at {place}; its device stays attached"
                    ));
                }
                // Another publisher of the volume could not detach what this one has open.
                self.devices.release_unmounted(id, &self.root)?;
                Ok(cleanup)
            }
            None => Ok(block.detach()?.and(cleanup)),
        }
    }

    /// Deletes a volume that is not published, also if its device is attached. Returns `false` if there is none.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`]: it is published. [`ErrorKind::Busy`]: another program uses its device. Those of
    /// [`VolumeStore::delete`].
    pub fn delete(&self, id: &VolumeId) -> Result<bool> {
        self.delete_while(id, || true)
    }

    /// As [`delete`](Self::delete), but only if `is_wanted` returns `true`: see [`VolumeStore::delete_while`].
    ///
    /// # Errors
    /// As [`delete`](Self::delete) and [`VolumeStore::delete_while`].
    pub fn delete_while(&self, id: &VolumeId, is_wanted: impl FnOnce() -> bool) -> Result<bool> {
        let _lock = self.root.volume_locks.lock(id.clone());
        match self.store.volume(id) {
            Ok(volume) => {
                self.require_unpublished("delete", id, self.published_at(&volume)?)?;
                self.sync_publication(id)?;
                if volume.kind() == VolumeKind::Block {
                    self.detach_for_deletion(&self.block(&volume)?, id)?;
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) if is_of_unusable_directory(&error) => self.sync_publication(id)?,
            Err(error) => return Err(error),
        }
        self.store.delete_while(id, is_wanted)
    }

    pub(super) fn block<'a>(&'a self, volume: &'a Volume) -> Result<BlockVolume<'a>> {
        BlockVolume::open(volume, &self.devices)
    }

    /// Returns the stale device of the volume at a target with this status. `image` is that of the volume, unless it was deleted.
    pub(super) fn stale_at(
        &self,
        id: &VolumeId,
        image: Option<BackingFile>,
        status: &FileStat,
    ) -> Result<Option<StaleDevice>> {
        StaleDevice::at_path(&self.store, &self.devices, id, image, status)
    }

    fn volume(&self, operation: &'static str, id: &VolumeId, requested: VolumeKind) -> Result<Volume> {
        let volume = self.store.volume(id)?;
        if volume.kind() == requested {
            return Ok(volume);
        }
        let requested = match requested {
            VolumeKind::Filesystem => "a directory",
            VolumeKind::Block => "a block device",
        };
        let detail = format!("{requested} is requested, but it is a {} volume", volume.kind());
        Err(Error::new(ErrorKind::InvalidInput, operation, id, detail))
    }

    /// Returns a Block volume, whose devices the caller detaches. Of a Filesystem volume, which has none, and of a deleted one, removes what
    /// is left.
    fn block_or_clean_up(&self, id: &VolumeId) -> Result<ControlFlow<Cleanup, Volume>> {
        let cleanup = match self.store.volume(id) {
            Ok(volume) if volume.kind() == VolumeKind::Block => return Ok(ControlFlow::Continue(volume)),
            Ok(_directory) => Cleanup::Complete,
            // Devices can be detached even if the disk accepts no writes.
            Err(error) if error.kind() == ErrorKind::NotFound => self.detach_stale_devices(id)?,
            Err(error) if is_of_unusable_directory(&error) => Cleanup::Complete,
            Err(error) => return Err(error),
        };
        // The call that unpublished the volume may have found the storage unavailable, and left the record.
        self.sync_publication(id)?;
        Ok(ControlFlow::Break(cleanup))
    }

    fn require_unpublished(
        &self,
        operation: &'static str,
        id: &VolumeId,
        place: Option<PathBuf>,
    ) -> Result<()> {
        match place {
            None => Ok(()),
            Some(place) => {
                let remedy = if place.starts_with(self.root.path()) {
                    "unpublish it there first"
                } else {
                    "unmount it"
                };
                let cause = format!("it is in use: still published at {}", place.display());
                let volume = ContentSource::Volume(id);
                Err(Error::new(ErrorKind::Conflict, operation, volume, cause).with_remedy(remedy))
            }
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
        let cause =
            format!("a program has {} open, which this one has not published", device.path().display());
        Err(Error::new(ErrorKind::Busy, "delete", id, cause).with_remedy("end it"))
    }

    /// Returns an error if the target is in a directory of the store, such as in a volume. The root itself may be on the same file system.
    fn refuse_place_in_store(&self, target: &Target) -> Result<()> {
        if target.directory_device()? != self.store.device()? {
            return Ok(());
        }
        match target.place_on_its_filesystem()?.iter().nth(1).and_then(OsStr::to_str) {
            Some(name) if self.store.owns_name(name) => {
                Err(target.conflict("it is in a directory of the store").with_remedy("choose another one"))
            }
            _ => Ok(()),
        }
    }

    /// Returns an error if the target shows another volume of this store, or what no volume shows.
    fn refuse_other(&self, id: &VolumeId, target: &Target) -> Result<()> {
        let Some(mount) = target.mount()? else { return Ok(()) };
        let other = if let Some(number) = target.loop_device().ok().flatten() {
            let shown = self.devices.volume_of(number).flatten();
            shown.filter(|volume| volume != id).map(|volume| format!("volume {volume}"))
        } else if mount.fs_type == "xfs"
            && let Ok(root) = mount.root.strip_prefix("/volumes")
        {
            // Also of a disk that was mounted again since, so that the device differs.
            (!root.starts_with(id.as_str())).then(|| format!("volume {}", root.display()))
        } else if mount.device == self.store.device()? {
            None
        } else {
            Some(format!("a file system of the type {}", mount.fs_type))
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
        let closed = self.root.mounted_devices().and_then(|mounted| {
            let unmounted = orphans.into_iter().filter(|number| mounted.find(*number, None).is_none());
            let close = |number| self.devices.close(number, None, None, &|file| self.store.holds(file));
            // All of them, also after an error.
            let closed: Vec<Result<Cleanup>> = unmounted.map(close).collect();
            closed.into_iter().try_for_each(|closed| closed.map(drop))
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
    fn detach_stale_devices(&self, volume: &VolumeId) -> Result<Cleanup> {
        let (mut cleanup, mounted) = (Cleanup::Complete, self.root.mounted_devices()?);
        for number in self.devices.numbers(Some(volume)) {
            if mounted.find(number, None).is_none() {
                cleanup = self.devices.close(number, Some(volume), None, &|_| true)?.and(cleanup);
            }
        }
        for stale in StaleDevice::all_for_deleted(&self.store, &self.devices, volume)? {
            cleanup = stale.detach(&self.devices, &mounted)?.and(cleanup);
        }
        Ok(cleanup)
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
        if block.published_at(&self.root.mounted_devices()?, None)?.is_none() {
            // A deferred detach does not keep the image, which was deleted.
            let _deferred = block.detach()?;
        }
        // Returns the same error as later calls, if the volume was deleted.
        self.store.volume(volume.id()).map(drop)?;
        let cause = "it was replaced while its device was attached";
        Err(Error::new(ErrorKind::Conflict, "attach", volume.id(), cause).with_remedy("retry"))
    }
}

/// Returns `true` if the store has returned this error of a directory that it cannot use: one without limits, or without the store's mark,
/// for instance from a backup. Such a volume can be unpublished and deleted. Images have other errors.
fn is_of_unusable_directory(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotEnforced | ErrorKind::InvalidInput)
}

fn refuse_second(id: &VolumeId, other: Option<PathBuf>) -> Result<()> {
    match other {
        None => Ok(()),
        Some(other) => {
            let cause =
                format!("it is published at {}, but may have only one target at a time", other.display());
            Err(Error::new(ErrorKind::Conflict, "publish", id, cause).with_remedy("unpublish it there first"))
        }
    }
}
