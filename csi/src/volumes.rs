//! What is done with volumes. Everything is found out anew from the store, the mount table and the loop devices,
//! so a driver that was restarted, or was never told that a volume is staged, does the same. All of it blocks.

use std::path::PathBuf;
use std::sync::Arc;

use loopfs::{
    AbnormalReason, Bytes, Condition, ErrorKind, LoopControl, Volume, VolumeId, VolumeKind, VolumeStats,
    mountinfo,
};
use nix::sys::stat::FileStat;

use crate::error::{Error, Result};
use crate::mounted_devices::MountedDevices;
use crate::publish_block::BlockVolume;
use crate::publish_mount::Directory;
use crate::request::{
    AccessType, CapacityRange, Expand, Exposure, Publish, Stage, Stats, TargetPath, Unstage,
};
use crate::storage::{Janitor, Storage, StorageGate};
use crate::stray_device::StrayDevice;
use crate::target::PublishRoot;

mod inventory;
mod provision;
mod snapshots;
mod unreachable;

pub(crate) use inventory::{Described, Page};
pub(crate) use provision::UNIT as SMALLEST;
pub(crate) use snapshots::SnapshotPage;

/// The volumes of this node.
#[derive(Debug)]
pub(crate) struct Volumes {
    gate: Arc<StorageGate>,
    root: Arc<PublishRoot>,
    janitor: Arc<Janitor>,
}

impl Volumes {
    pub(crate) fn new(gate: Arc<StorageGate>, root: Arc<PublishRoot>, janitor: Arc<Janitor>) -> Self {
        Self { gate, root, janitor }
    }

    /// Makes the volume ready. Publishing does the same where it finds it undone: staging may not have survived a
    /// reboot, and an orchestrator need not repeat it.
    pub(crate) fn stage(&self, stage: &Stage) -> Result<()> {
        let storage = self.gate.verified()?;
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
                require_there(&storage, &volume, &block)
            }
        }
    }

    pub(crate) fn unstage(&self, unstage: &Unstage) -> Result<()> {
        let storage = self.gate.opened()?;
        let volume = match find(&storage, &unstage.volume)? {
            Found::Block(volume) => volume,
            // If the storage could not be used when the volume was unpublished, that was left to this.
            Found::WithoutDevices => return self.settle_use(&storage, &unstage.volume),
            Found::Gone => {
                self.settle_use(&storage, &unstage.volume)?;
                return self.detach_strays(&storage, &unstage.volume);
            }
        };
        let block = BlockVolume::open(&volume, &storage.loops)?;
        refuse_published(&volume, block.published_at(&self.mounted_devices()?, None)?)?;
        block.detach()
    }

    pub(crate) fn publish(&self, publish: &Publish) -> Result<()> {
        let storage = self.gate.verified()?;
        storage.require_filesystem(publish.filesystem)?;
        let volume = storage.store.volume(&publish.volume)?;
        let target = self.root.locate(&publish.target)?.ok_or_else(|| {
            Error::Precondition(format!(
                "target_path: the directory of {} does not exist; make it",
                publish.target
            ))
        })?;
        match publish.exposure {
            Exposure::Mount(flags) => {
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
            Exposure::Block(access) => {
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
                require_there(&storage, &volume, &block)?;
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
        let storage = self.gate.opened()?;
        let volume = match find(&storage, id)? {
            Found::Block(volume) => volume,
            Found::WithoutDevices => return self.settle_use(&storage, id),
            Found::Gone => {
                // Not prevented by a disk that takes no writes.
                self.detach_strays(&storage, id)?;
                return self.settle_use(&storage, id);
            }
        };
        let block = BlockVolume::open(&volume, &storage.loops)?;
        let mounted = self.mounted_devices()?;
        if let Some(status) = &cleared.showed
            && let Some(stray) = StrayDevice::shown(&storage, id, Some(block.image()?), status)?
        {
            stray.detach(&storage, &mounted)?;
        }
        match block.published_at(&mounted, None)? {
            Some(_in_use) => Ok(()),
            None => block.detach(),
        }
    }

    /// Writes down where a volume is shown, or that it is not, as the mount table has it.
    fn settle_use(&self, storage: &Storage, volume: &VolumeId) -> Result<()> {
        Ok(storage.store.settle_use(volume, &self.root.mounts()?)?)
    }

    /// Takes away the devices of a volume that was deleted while it was in use.
    fn detach_strays(&self, storage: &Storage, volume: &VolumeId) -> Result<()> {
        let strays = StrayDevice::all_of_gone(storage, volume)?;
        if strays.is_empty() {
            return Ok(());
        }
        let mounted = self.mounted_devices()?;
        strays.iter().try_for_each(|stray| stray.detach(storage, &mounted))
    }

    /// The devices that are published now, of any volume.
    fn mounted_devices(&self) -> Result<MountedDevices> {
        MountedDevices::among(&self.root.mounts()?)
    }

    pub(crate) fn stats(&self, stats: &Stats) -> Result<VolumeStats> {
        let target = stats.path.as_ref().map(|path| self.root.locate(path)).transpose()?.flatten();
        let storage = match self.gate.verified() {
            Ok(storage) => storage,
            Err(Error::StorageClosed(reason)) => {
                let target = target.ok_or_else(|| not_published(stats))?;
                return unreachable::stats(&stats.volume, &target, reason)?
                    .ok_or_else(|| not_published(stats));
            }
            Err(error) => return Err(error),
        };
        let status = target.map(|target| target.status()).transpose()?.flatten();
        let stray = |image| match &status {
            Some(status) => StrayDevice::shown(&storage, &stats.volume, image, status),
            None => Ok(None),
        };
        let volume = match storage.store.volume(&stats.volume) {
            Ok(volume) => volume,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let stray = stray(None)?.ok_or(error)?;
                return Ok(stray.stats());
            }
            Err(error) => return Err(error.into()),
        };
        let shown = match (&status, volume.kind()) {
            (None, _) => false,
            (Some(status), VolumeKind::Filesystem) => Directory::open(&volume)?.is(status),
            (Some(status), VolumeKind::Block) => {
                let block = BlockVolume::open(&volume, &storage.loops)?;
                let own = block.device_of(status)?.is_some();
                if !own && let Some(stray) = stray(Some(block.image()?))? {
                    return Ok(stray.stats());
                }
                own
            }
        };
        if shown { health(&volume, &storage.loops) } else { Err(not_published(stats)) }
    }

    /// Answers the size that the volume has on this node now. Growing the image or the quota is not done here: that is
    /// for whoever makes volumes.
    pub(crate) fn expand(&self, expand: &Expand) -> Result<Bytes> {
        let storage = self.gate.verified()?;
        let volume = storage.store.volume(&expand.volume)?;
        if let Some(access_type) = expand.access_type {
            require_kind(&volume, access_type.kind())?;
        }
        let size = match volume.kind() {
            VolumeKind::Filesystem => volume.capacity(),
            VolumeKind::Block => show_size(&volume, &storage)?,
        };
        let CapacityRange { at_least, at_most } = expand.capacity;
        match (at_least, at_most) {
            (Some(at_least), _) if size < at_least => Err(Error::NotYet(format!(
                "volume {} has {size}, {at_least} are required; the volume itself is expanded first",
                expand.volume
            ))),
            (_, Some(at_most)) if size > at_most => Err(Error::OutOfRange(format!(
                "volume {} has {size} already, above the limit of {at_most}",
                expand.volume
            ))),
            _ => Ok(size),
        }
    }

    /// Has the devices of a Block volume show that it has grown, if it has since they were last told. Answers the size
    /// they have then.
    ///
    /// It needs no guard, and so keeps no call from being served: to show more of the image does no harm to a device that is
    /// coming or going, and one that is being attached looks at the size once more when it is.
    pub(crate) fn show_growth(&self, id: &VolumeId) -> Result<Option<Bytes>> {
        let storage = self.gate.opened()?;
        let volume = storage.store.volume(id)?;
        let told = volume.kind() != VolumeKind::Block
            || volume.refreshed()?.is_some_and(|known| known >= volume.capacity());
        if told { Ok(None) } else { show_size(&volume, &storage).map(Some) }
    }
}

/// Makes the devices of a Block volume as large as its image, and says so to whoever grew it.
fn show_size(volume: &Volume, storage: &Storage) -> Result<Bytes> {
    let size = BlockVolume::open(volume, &storage.loops)?.expand()?;
    volume.record_refreshed(size)?;
    Ok(size)
}

fn not_published(stats: &Stats) -> Error {
    let path = stats.path.as_ref().map_or_else(|| "that path".to_owned(), TargetPath::to_string);
    Error::NotPublished(format!("volume {} is not published at {path}", stats.volume))
}

/// What a target showed before it was cleared.
pub(crate) struct Cleared {
    showed: Option<FileStat>,
}

/// A volume, to whatever takes away what was made for it.
enum Found {
    Block(Volume),
    /// It can have no loop devices.
    WithoutDevices,
    Gone,
}

fn find(storage: &Storage, volume: &VolumeId) -> Result<Found> {
    match storage.store.volume(volume) {
        Ok(volume) if volume.kind() == VolumeKind::Block => Ok(Found::Block(volume)),
        Ok(_directory) => Ok(Found::WithoutDevices),
        Err(error) => match error.kind() {
            ErrorKind::NotFound => Ok(Found::Gone),
            // Said of directories only: of one without limits, or without the store's mark.
            ErrorKind::NotEnforced | ErrorKind::InvalidInput => Ok(Found::WithoutDevices),
            _ => Err(error.into()),
        },
    }
}

fn require_kind(volume: &Volume, asked: VolumeKind) -> Result<()> {
    if volume.kind() == asked {
        return Ok(());
    }
    let asked = match asked {
        VolumeKind::Filesystem => "mount",
        VolumeKind::Block => "block",
    };
    Err(Error::WrongAccessType(format!("{asked} is asked of {}, a {} volume", volume.id(), volume.kind())))
}

/// How full a volume is and how it fares, its devices among it.
fn health(volume: &Volume, loops: &LoopControl) -> Result<VolumeStats> {
    let mut stats = volume.stats()?;
    if volume.kind() == VolumeKind::Block
        && stats.condition == Condition::Healthy
        && let Some(trouble) = BlockVolume::open(volume, loops)?.trouble()?
    {
        stats.condition = Condition::abnormal(AbnormalReason::DirectIoLost, trouble);
    }
    Ok(stats)
}

/// A mount point among `mounts` that shows the volume.
fn published_at(
    volume: &Volume,
    loops: &LoopControl,
    mounts: &[mountinfo::Mount],
    mounted: &MountedDevices,
) -> Result<Option<PathBuf>> {
    match volume.kind() {
        VolumeKind::Filesystem => Ok(Directory::open(volume)?.published_at(mounts, None)),
        VolumeKind::Block => BlockVolume::open(volume, loops)?.published_at(mounted, None),
    }
}

/// That a volume which was attached a moment ago was not deleted a moment before: once it is attached, it is not.
fn require_there(storage: &Storage, volume: &Volume, block: &BlockVolume<'_>) -> Result<()> {
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

fn refuse_published(volume: &Volume, mount_point: Option<PathBuf>) -> Result<()> {
    match mount_point {
        None => Ok(()),
        Some(mount_point) => Err(Error::Precondition(format!(
            "volume {} is still published at {}; unpublish it there first",
            volume.id(),
            mount_point.display()
        ))),
    }
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
