//! Staging and publishing, and their undoing.

use std::path::PathBuf;
use std::sync::Arc;

use loopfs::{ErrorKind, Volume, VolumeId, VolumeKind};
use nix::sys::stat::FileStat;

use super::block_device::BlockVolume;
use super::directory::Directory;
use super::mounted_devices::MountedDevices;
use super::stale_device::StaleDevice;
use super::volume::{TeardownTarget, find, refuse_published, require_kind};
use crate::error::{Error, Result};
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

    /// Makes the volume ready. Publishing does the same where it finds it undone: staging may not have survived a
    /// reboot, and an orchestrator need not repeat it.
    pub(crate) fn stage(&self, stage: &Stage) -> Result<()> {
        let storage = self.monitor.verified()?;
        storage.require_filesystem(stage.filesystem)?;
        let volume = storage.store.volume(&stage.volume)?;
        let access =
            if stage.capability.read_only { loopfs::Access::ReadOnly } else { loopfs::Access::ReadWrite };
        require_kind(&volume, stage.capability.access_type.kind())?;
        match stage.capability.access_type {
            AccessType::Mount(_) => Ok(()),
            AccessType::Block => {
                let block = BlockVolume::open(&volume, &storage.loops)?;
                // A device of the other access may be published; publishing the volume decides about it.
                if block.devices()?.iter().all(|device| device.binding().access == access) {
                    block.attach(access)?;
                }
                require_not_deleted(&storage, &volume, &block)
            }
        }
    }

    pub(crate) fn unstage(&self, unstage: &Unstage) -> Result<()> {
        let storage = self.monitor.current()?;
        let volume = match find(&storage, &unstage.volume)? {
            TeardownTarget::Block(volume) => volume,
            // If the storage could not be used when the volume was unpublished, that was left to this.
            TeardownTarget::WithoutDevices => return self.sync_publication(&storage, &unstage.volume),
            TeardownTarget::Deleted => {
                self.sync_publication(&storage, &unstage.volume)?;
                return self.detach_stale_devices(&storage, &unstage.volume);
            }
        };
        let block = BlockVolume::open(&volume, &storage.loops)?;
        refuse_published(&volume, block.published_at(&self.mounted_devices()?, None)?)?;
        block.detach()
    }

    pub(crate) fn publish(&self, publish: &Publish) -> Result<()> {
        let storage = self.monitor.verified()?;
        storage.require_filesystem(publish.filesystem)?;
        let volume = storage.store.volume(&publish.volume)?;
        let target = self.root.locate(&publish.target)?.ok_or_else(|| {
            Error::Precondition(format!(
                "target_path: the directory of {} does not exist; make it",
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
                // First, for whoever deletes volumes does not see this process's mounts.
                storage.store.record_use(volume.id(), target.path())?;
                directory.publish(&target, flags)
            }
            PublishMode::Block(access) => {
                require_kind(&volume, VolumeKind::Block)?;
                let block = BlockVolume::open(&volume, &storage.loops)?;
                if block.is_published(&target, access)? {
                    return Ok(());
                }
                let mounted = self.mounted_devices()?;
                if publish.single_target {
                    let other = block.published_at(&mounted, Some(&target))?;
                    refuse_second_target(&volume, other)?;
                }
                block.detach_other_access(&mounted, access)?;
                block.attach(access)?;
                require_not_deleted(&storage, &volume, &block)?;
                block.publish(&target, access)
            }
        }
    }

    /// Unmounts and removes the target, whatever it shows and whether or not the volume or the storage still exists: an
    /// orchestrator has no other way to let a workload end.
    ///
    /// Nothing here writes to the data disk, reads it, or waits for a lock of a process that does: the disk may hang.
    pub(crate) fn clear_target(&self, target: &TargetPath) -> Result<Cleared> {
        let Some(target) = self.root.locate(target)? else { return Ok(Cleared { showed: None }) };
        // XFS that has shut down fails this call (EIO).
        let showed = target.status().ok().flatten();
        target.unmount()?;
        target.remove()?;
        Ok(Cleared { showed })
    }

    /// What is to be done about a volume that was taken away from a target: its devices are detached and its publication
    /// record is removed, if it is published nowhere now. NodeUnstageVolume does the same.
    ///
    /// It does so also if nothing was mounted at the target: a crash may have come between the two.
    pub(crate) fn clean_up(&self, id: &VolumeId, cleared: &Cleared) -> Result<()> {
        let storage = self.monitor.current()?;
        let volume = match find(&storage, id)? {
            TeardownTarget::Block(volume) => volume,
            TeardownTarget::WithoutDevices => return self.sync_publication(&storage, id),
            TeardownTarget::Deleted => {
                // Not prevented by a disk that takes no writes.
                self.detach_stale_devices(&storage, id)?;
                return self.sync_publication(&storage, id);
            }
        };
        let block = BlockVolume::open(&volume, &storage.loops)?;
        let mounted = self.mounted_devices()?;
        if let Some(status) = &cleared.showed
            && let Some(stale) = StaleDevice::at_path(&storage, id, Some(block.image()?), status)?
        {
            stale.detach(&storage, &mounted)?;
        }
        match block.published_at(&mounted, None)? {
            Some(_in_use) => Ok(()),
            None => block.detach(),
        }
    }

    /// Writes down where a volume is shown, or that it is not, as the mount table has it.
    fn sync_publication(&self, storage: &Storage, volume: &VolumeId) -> Result<()> {
        Ok(storage.store.settle_use(volume, &self.root.mounts()?)?)
    }

    /// Takes away the devices of a volume that was deleted while it was in use.
    fn detach_stale_devices(&self, storage: &Storage, volume: &VolumeId) -> Result<()> {
        let stale_devices = StaleDevice::all_for_deleted(storage, volume)?;
        if stale_devices.is_empty() {
            return Ok(());
        }
        let mounted = self.mounted_devices()?;
        stale_devices.iter().try_for_each(|stale| stale.detach(storage, &mounted))
    }

    /// The devices that are published now, of any volume.
    fn mounted_devices(&self) -> Result<MountedDevices> {
        MountedDevices::among(&self.root.mounts()?)
    }
}

/// What a target showed before it was cleared.
pub(crate) struct Cleared {
    showed: Option<FileStat>,
}

/// That a volume which was attached a moment ago was not deleted a moment before: once it is attached, it is not.
fn require_not_deleted(storage: &Storage, volume: &Volume, block: &BlockVolume<'_>) -> Result<()> {
    let there = match storage.store.volume(volume.id()) {
        Ok(there) => BlockVolume::open(&there, &storage.loops)?.image()? == block.image()?,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(error.into()),
    };
    if there {
        return Ok(());
    }
    block.detach()?;
    // As whoever comes later is told.
    storage.store.volume(volume.id()).map(drop)?;
    Err(Error::Precondition(format!("volume {} was replaced while it was attached; try again", volume.id())))
}

fn refuse_second_target(volume: &Volume, other: Option<PathBuf>) -> Result<()> {
    match other {
        None => Ok(()),
        Some(other) => Err(Error::Precondition(format!(
            "volume {} is published at {}, and its access mode allows one target at a time",
            volume.id(),
            other.display()
        ))),
    }
}
