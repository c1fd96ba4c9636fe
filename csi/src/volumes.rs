//! What is done with volumes. Everything is found out anew from the store, the mount table and the loop devices,
//! so a driver that was restarted, or was never told that a volume is staged, does the same. All of it blocks.

use std::path::PathBuf;
use std::sync::Arc;

use loopfs::{
    Bytes, Condition, ErrorKind, LoopControl, Volume, VolumeId, VolumeKind, VolumeStats, mountinfo,
};

use crate::error::{Error, Result};
use crate::janitor::Janitor;
use crate::publish_block::BlockVolume;
use crate::publish_mount::Directory;
use crate::request::{
    AccessType, CapacityRange, Expand, Exposure, Publish, Stage, Stats, TargetPath, Unpublish, Unstage,
};
use crate::storage::{Storage, StorageGate};
use crate::target::{PublishRoot, Target};

mod inventory;
mod provision;
mod snapshots;

pub(crate) use inventory::{Described, Page};
pub(crate) use provision::UNIT as SMALLEST;
pub(crate) use snapshots::SnapshotPage;

/// The volumes of this node.
#[derive(Debug)]
pub(crate) struct Volumes {
    gate: Arc<StorageGate>,
    root: PublishRoot,
    janitor: Arc<Janitor>,
}

impl Volumes {
    pub(crate) fn new(gate: Arc<StorageGate>, root: PublishRoot, janitor: Arc<Janitor>) -> Self {
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
            AccessType::Block => BlockVolume::open(&volume, &storage.loops)?.attach(access).map(drop),
        }
    }

    pub(crate) fn unstage(&self, unstage: &Unstage) -> Result<()> {
        let storage = self.gate.opened()?;
        let Some(volume) = with_devices(&storage, &unstage.volume)? else { return Ok(()) };
        let block = BlockVolume::open(&volume, &storage.loops)?;
        refuse_published(&volume, block.published_at(&self.root.mounts()?, None)?)?;
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
                directory.publish(&target, flags)
            }
            Exposure::Block(access) => {
                require_kind(&volume, VolumeKind::Block)?;
                let block = BlockVolume::open(&volume, &storage.loops)?;
                if block.is_published(&target, access)? {
                    return Ok(());
                }
                if publish.single_target {
                    let other = block.published_at(&self.root.mounts()?, Some(&target))?;
                    refuse_second_target(&volume, other)?;
                }
                block.publish(&target, access)
            }
        }
    }

    /// Why the storage under the volumes cannot be used, if so.
    pub(crate) fn storage_trouble(&self) -> Option<String> {
        self.gate.verified().err().map(|error| error.to_string())
    }

    /// Takes the volume away from the target. The target is cleared whatever it shows and whether or not the volume or
    /// the storage still exists: an orchestrator has no other way to let a workload end.
    pub(crate) fn unpublish(&self, unpublish: &Unpublish) -> Result<()> {
        if let Some(target) = self.root.locate(&unpublish.target)? {
            target.unmount()?;
            target.remove()?;
        }
        // Not only when something was unmounted just now: a crash may have come between the two.
        let storage = match self.gate.opened() {
            Ok(storage) => storage,
            Err(error) => {
                tracing::warn!(%error, "a loop device of the volume, if it has one, is left to NodeUnstageVolume");
                return Ok(());
            }
        };
        let Some(volume) = with_devices(&storage, &unpublish.volume)? else { return Ok(()) };
        let block = BlockVolume::open(&volume, &storage.loops)?;
        match block.published_at(&self.root.mounts()?, None)? {
            Some(_in_use) => Ok(()),
            None => block.detach(),
        }
    }

    pub(crate) fn stats(&self, stats: &Stats) -> Result<VolumeStats> {
        let storage = self.gate.opened()?;
        let volume = storage.store.volume(&stats.volume)?;
        let path = stats.path.as_ref().map(|path| self.root.locate(path)).transpose()?.flatten();
        require_shown(stats, path, |status| match volume.kind() {
            VolumeKind::Filesystem => Ok(Directory::open(&volume)?.is(status)),
            VolumeKind::Block => Ok(BlockVolume::open(&volume, &storage.loops)?.device_of(status)?.is_some()),
        })?;
        let mut answer = health(&volume, &storage.loops)?;
        if let Err(error) = storage.store.verify() {
            answer.condition = Condition::Abnormal(error.to_string());
        }
        Ok(answer)
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
            VolumeKind::Block => BlockVolume::open(&volume, &storage.loops)?.expand()?,
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
}

/// The volume, if it is one that can have loop devices. That it is gone is no error to whatever takes away.
fn with_devices(storage: &Storage, volume: &VolumeId) -> Result<Option<Volume>> {
    match storage.store.volume(volume) {
        Ok(volume) => Ok(Some(volume).filter(|volume| volume.kind() == VolumeKind::Block)),
        // The last two are said of directories only: of one without limits, or without the store's mark.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::NotEnforced | ErrorKind::InvalidInput
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error.into()),
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
        stats.condition = Condition::Abnormal(trouble);
    }
    Ok(stats)
}

/// A mount point among `mounts` that shows the volume.
fn published_at(
    volume: &Volume,
    loops: &LoopControl,
    mounts: &[mountinfo::Mount],
) -> Result<Option<PathBuf>> {
    match volume.kind() {
        VolumeKind::Filesystem => Ok(Directory::open(volume)?.published_at(mounts, None)),
        VolumeKind::Block => BlockVolume::open(volume, loops)?.published_at(mounts, None),
    }
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

fn require_shown(
    stats: &Stats,
    path: Option<Target>,
    shows: impl FnOnce(&nix::sys::stat::FileStat) -> Result<bool>,
) -> Result<()> {
    let status = path.map(|path| path.status()).transpose()?.flatten();
    let shown = status.map(|status| shows(&status)).transpose()?.unwrap_or(false);
    if shown {
        return Ok(());
    }
    let path = stats.path.as_ref().map_or_else(|| "that path".to_owned(), TargetPath::to_string);
    Err(Error::NotPublished(format!("volume {} is not published at {path}", stats.volume)))
}
