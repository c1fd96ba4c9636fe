//! Staging and publishing volumes, and the reverse operations.

use std::path::PathBuf;
use std::sync::Arc;

use loopfs::ErrorKind;
use loopfs::loop_device::{Access, LoopDevice};
use loopfs::volume_store::{Volume, VolumeId, VolumeKind};
use nix::sys::stat::FileStat;

use super::block_device::{self, BlockVolume, Cleanup};
use super::directory::Directory;
use super::stale_device::StaleDevice;
use super::volume::{TeardownTarget, find, refuse_published, require_kind};
use crate::error::{Error, Result};
use crate::mounted_devices::MountedDevices;
use crate::request::{AccessType, Publish, PublishMode, Stage, TargetPath, Unstage};
use crate::storage::{Storage, StorageMonitor, TrashCleanup};
use crate::target::PublishRoot;

/// The volumes of this node.
#[derive(Debug)]
pub(crate) struct Volumes {
    pub(super) monitor: Arc<StorageMonitor>,
    pub(super) root: Arc<PublishRoot>,
    pub(super) trash_cleanup: Arc<TrashCleanup>,
}

impl Volumes {
    pub(crate) fn new(
        monitor: Arc<StorageMonitor>,
        root: Arc<PublishRoot>,
        trash_cleanup: Arc<TrashCleanup>,
    ) -> Self {
        Self { monitor, root, trash_cleanup }
    }

    /// Stages a volume: attaches the device of a Block volume. Publishing does the same if it is necessary, because
    /// staging may not have survived a reboot and an orchestrator need not repeat it.
    pub(crate) fn stage(&self, stage: &Stage) -> Result<()> {
        let storage = self.monitor.verified()?;
        storage.require_filesystem(stage.filesystem)?;
        let volume = storage.store.volume(&stage.volume)?;
        let access = if stage.capability.read_only { Access::ReadOnly } else { Access::ReadWrite };
        require_kind(&volume, stage.capability.access_type.kind())?;
        match stage.capability.access_type {
            AccessType::Mount(_) => Ok(()),
            AccessType::Block => {
                let block = BlockVolume::open(&volume, &storage)?;
                // The volume may be published with the other access. The publish call decides about that.
                if block.devices()?.iter().all(|device| device.binding().access == access) {
                    self.attach(&storage, &volume, &block, access)?;
                }
                Ok(())
            }
        }
    }

    /// Detaches the devices of a volume that is published nowhere. The error is [`Error::StorageUnavailable`] if the storage is the
    /// cause.
    pub(crate) fn unstage(&self, unstage: &Unstage) -> Result<Cleanup> {
        self.detach(unstage).map_err(|error| self.storage_error_or(error))
    }

    fn detach(&self, unstage: &Unstage) -> Result<Cleanup> {
        let storage = self.monitor.current()?;
        let volume = match find(&storage, &unstage.volume)? {
            TeardownTarget::Block(volume) => volume,
            // If the storage was unavailable when the volume was unpublished, its publication record is removed here.
            TeardownTarget::WithoutDevices => {
                self.sync_publication(&storage, &unstage.volume)?;
                return Ok(Cleanup::Complete);
            }
            TeardownTarget::Deleted => {
                self.sync_publication(&storage, &unstage.volume)?;
                self.detach_stale_devices(&storage, &unstage.volume)?;
                return Ok(Cleanup::Complete);
            }
        };
        let block = BlockVolume::open(&volume, &storage)?;
        refuse_published(&volume, block.published_at(&self.mounted_devices()?, None)?)?;
        block.detach()
    }

    pub(crate) fn publish(&self, publish: &Publish) -> Result<()> {
        let storage = self.monitor.verified()?;
        storage.require_filesystem(publish.filesystem)?;
        let volume = storage.store.volume(&publish.volume)?;
        let target = self.root.locate(&publish.target)?.ok_or_else(|| {
            Error::Precondition(format!(
                "target_path: the directory of {} does not exist; create it",
                publish.target
            ))
        })?;
        match publish.mode {
            PublishMode::Mount(flags) => {
                require_kind(&volume, VolumeKind::Filesystem)?;
                let directory = Directory::open(&volume)?;
                if directory.is_published(&target, flags)? {
                    return Ok(());
                }
                if publish.single_target {
                    let other = directory.published_at(&self.root.mounts()?, Some(&target));
                    refuse_second_target(&volume, other)?;
                }
                // Recorded before the mount, because the provisioner, which deletes volumes, does not see the mounts of
                // this process.
                storage.store.record_publication(volume.id(), target.path())?;
                directory.publish(&target, flags)
            }
            PublishMode::Block(access) => {
                require_kind(&volume, VolumeKind::Block)?;
                let block = BlockVolume::open(&volume, &storage)?;
                if block.is_published(&target, access)? {
                    return Ok(());
                }
                let mounted = self.mounted_devices()?;
                if publish.single_target {
                    let other = block.published_at(&mounted, Some(&target))?;
                    refuse_second_target(&volume, other)?;
                }
                block.detach_other_access(&mounted, access)?;
                let device = self.attach(&storage, &volume, &block, access)?;
                // Before the node is mounted, from when on it may reach a container.
                storage.held.hold(volume.id(), &device)?;
                block_device::publish(&device, &target)
            }
        }
    }

    /// Unmounts and removes the target, whatever is mounted there and even if the volume or the storage no longer
    /// exists. An orchestrator has no other way to stop a workload.
    ///
    /// Does not write to the data disk, read it, or wait for a lock of a process that does, because the disk may hang.
    pub(crate) fn clear_target(&self, target: &TargetPath) -> Result<ClearedTarget> {
        let Some(target) = self.root.locate(target)? else { return Ok(ClearedTarget::default()) };
        // This call fails with EIO on an XFS file system that has shut down.
        let status = target.status().ok().flatten();
        target.unmount()?;
        target.remove()?;
        Ok(ClearedTarget { status })
    }

    /// Cleans up after a volume was unpublished from a target. If the volume is not published anywhere else, detaches
    /// its devices and removes its publication record.
    ///
    /// Does so even if nothing was mounted at the target, because an earlier call may have crashed between the unmount
    /// and the cleanup. The error is [`Error::StorageUnavailable`] if the storage is the cause.
    pub(crate) fn clean_up(&self, id: &VolumeId, cleared: &ClearedTarget) -> Result<Cleanup> {
        self.detach_or_sync(id, cleared).map_err(|error| self.storage_error_or(error))
    }

    fn detach_or_sync(&self, id: &VolumeId, cleared: &ClearedTarget) -> Result<Cleanup> {
        let storage = self.monitor.current()?;
        self.close_orphans(&storage);
        let volume = match find(&storage, id)? {
            TeardownTarget::Block(volume) => volume,
            TeardownTarget::WithoutDevices => {
                self.sync_publication(&storage, id)?;
                return Ok(Cleanup::Complete);
            }
            TeardownTarget::Deleted => {
                // Devices can be detached even if the disk accepts no writes.
                self.detach_stale_devices(&storage, id)?;
                self.sync_publication(&storage, id)?;
                return Ok(Cleanup::Complete);
            }
        };
        let block = BlockVolume::open(&volume, &storage)?;
        let mounted = self.mounted_devices()?;
        if let Some(status) = &cleared.status
            && let Some(stale) = StaleDevice::at_path(&storage, id, Some(block.image()?), status)?
        {
            stale.detach(&storage, &mounted)?;
        }
        match block.published_at(&mounted, None)? {
            Some(_in_use) => Ok(Cleanup::Complete),
            None => block.detach(),
        }
    }

    /// Closes the devices of no volume whose nodes are not mounted any more. An error is not one of the volume that is cleaned up.
    fn close_orphans(&self, storage: &Storage) {
        let orphans = storage.held.numbers(None);
        if orphans.is_empty() {
            return;
        }
        let closed = self.mounted_devices().and_then(|mounted| {
            let unmounted = orphans.into_iter().filter(|number| mounted.find(*number, None).is_none());
            let close = |number| storage.held.close(number, None, None, &storage.store, &storage.loops);
            // All of them, also after an error.
            let closed: Vec<Result<()>> = unmounted.map(close).collect();
            closed.into_iter().collect::<Result<()>>()
        });
        if let Err(error) = closed {
            tracing::warn!(%error, "a loop device that an earlier driver published could not be detached; the next cleanup retries");
        }
    }

    /// Closes the devices of a volume that are mounted nowhere. While the storage is unavailable, an administrator could otherwise neither
    /// detach them nor unmount the disk.
    pub(crate) fn release_unmounted(&self, id: &VolumeId) {
        let Some(held) = self.monitor.held() else { return };
        match self.mounted_devices() {
            Ok(mounted) => held.release_unmounted(id, &mounted),
            Err(error) => {
                tracing::warn!(volume = %id, %error, "the driver keeps the loop devices of the volume open")
            }
        }
    }

    /// Returns the error of the storage if it has failed, because that has probably caused `error`.
    fn storage_error_or(&self, error: Error) -> Error {
        self.monitor.verified().err().unwrap_or(error)
    }

    /// Records where the volume is published according to the mount table, or that it is not published.
    fn sync_publication(&self, storage: &Storage, volume: &VolumeId) -> Result<()> {
        Ok(storage.store.sync_publication(volume, &self.root.mounts()?)?)
    }

    /// Detaches the devices of a volume that was deleted while it was in use.
    fn detach_stale_devices(&self, storage: &Storage, volume: &VolumeId) -> Result<()> {
        let stale_devices = StaleDevice::all_for_deleted(storage, volume)?;
        if stale_devices.is_empty() {
            return Ok(());
        }
        let mounted = self.mounted_devices()?;
        stale_devices.iter().try_for_each(|stale| stale.detach(storage, &mounted))
    }

    /// Attaches the volume's device, or returns the device if it is attached already and cancels its deferred detach. Detaches
    /// it again if the volume was deleted in the meantime. Once the device is attached, deleting the volume is refused.
    ///
    /// NodePublishVolume calls this once, and keeps the device open until its node is mounted. It cannot rely on
    /// NodeStageVolume: the device does not survive a reboot, and another access or an unpublish call may have detached it.
    fn attach(
        &self,
        storage: &Storage,
        volume: &Volume,
        block: &BlockVolume<'_>,
        access: Access,
    ) -> Result<LoopDevice> {
        let device = block.attach(access)?;
        let present = match storage.store.volume(volume.id()) {
            Ok(present) => BlockVolume::open(&present, storage)?.image()? == block.image()?,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(error.into()),
        };
        if present {
            return Ok(device);
        }
        // The kernel would defer the detach of an open device.
        drop(device);
        // A container of the volume may still run, and has the node of the device.
        if block.published_at(&self.mounted_devices()?, None)?.is_none() {
            block.detach()?;
        }
        // Returns the same error as later calls, if the volume was deleted.
        storage.store.volume(volume.id()).map(drop)?;
        Err(Error::Precondition(format!(
            "volume {} was replaced while its device was attached; retry",
            volume.id()
        )))
    }

    /// Returns the loop devices that are mounted at targets, of any volume.
    fn mounted_devices(&self) -> Result<MountedDevices> {
        MountedDevices::among(&self.root.mounts()?)
    }
}

/// A target that was cleared.
#[derive(Clone, Copy, Default)]
pub(crate) struct ClearedTarget {
    status: Option<FileStat>,
}

fn refuse_second_target(volume: &Volume, other: Option<PathBuf>) -> Result<()> {
    match other {
        None => Ok(()),
        Some(other) => Err(Error::Precondition(format!(
            "volume {} is published at {}, but its access mode allows only one target at a time; unpublish it there first",
            volume.id(),
            other.display()
        ))),
    }
}
