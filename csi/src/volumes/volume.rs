//! One volume: found, info, and where it is published.

use std::path::PathBuf;

use loopfs::{
    AbnormalReason, Bytes, Condition, ErrorKind, FilesystemUuid, LoopControl, OwnedContentSource, Volume,
    VolumeId, VolumeKind, VolumeStats, mountinfo,
};

use super::block_device::BlockVolume;
use super::directory::Directory;
use super::mounted_devices::MountedDevices;
use crate::error::{Error, Result};
use crate::storage::Storage;

/// Sizes of volumes are multiples of this, which is also the least.
pub(crate) const UNIT: Bytes = Bytes(4096);

/// A volume as it is told of.
#[derive(Clone, Debug)]
pub(crate) struct VolumeInfo {
    pub(crate) volume: VolumeId,
    /// None where it cannot be found out.
    pub(crate) capacity: Option<Bytes>,
    /// `None` if the storage cannot be used.
    pub(crate) filesystem: Option<FilesystemUuid>,
    /// On this node.
    pub(crate) published: bool,
    pub(crate) condition: Condition,
    /// What it was made from, whether that is still there or not.
    pub(crate) source: Option<OwnedContentSource>,
}

/// A volume, to whatever takes away what was made for it.
pub(super) enum TeardownTarget {
    Block(Volume),
    /// It can have no loop devices.
    WithoutDevices,
    Deleted,
}

pub(super) fn find(storage: &Storage, volume: &VolumeId) -> Result<TeardownTarget> {
    match storage.store.volume(volume) {
        Ok(volume) if volume.kind() == VolumeKind::Block => Ok(TeardownTarget::Block(volume)),
        Ok(_directory) => Ok(TeardownTarget::WithoutDevices),
        Err(error) => match error.kind() {
            ErrorKind::NotFound => Ok(TeardownTarget::Deleted),
            // Said of directories only: of one without limits, or without the store's mark.
            ErrorKind::NotEnforced | ErrorKind::InvalidInput => Ok(TeardownTarget::WithoutDevices),
            _ => Err(error.into()),
        },
    }
}

pub(super) fn require_kind(volume: &Volume, requested: VolumeKind) -> Result<()> {
    if volume.kind() == requested {
        return Ok(());
    }
    let requested = match requested {
        VolumeKind::Filesystem => "mount",
        VolumeKind::Block => "block",
    };
    Err(Error::WrongAccessType(format!(
        "{requested} is requested of {}, a {} volume",
        volume.id(),
        volume.kind()
    )))
}

/// How full a volume is and how it fares, its devices among it.
pub(super) fn health(volume: &Volume, loops: &LoopControl) -> Result<VolumeStats> {
    let mut stats = volume.stats()?;
    if volume.kind() == VolumeKind::Block
        && stats.condition == Condition::Healthy
        && let Some(problem) = BlockVolume::open(volume, loops)?.problem()?
    {
        stats.condition = Condition::abnormal(AbnormalReason::DirectIoLost, problem);
    }
    Ok(stats)
}

/// A mount point among `mounts` that shows the volume.
pub(super) fn published_at(
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

pub(super) fn refuse_published(volume: &Volume, mount_point: Option<PathBuf>) -> Result<()> {
    match mount_point {
        None => Ok(()),
        Some(mount_point) => Err(Error::Precondition(format!(
            "volume {} is still published at {}; unpublish it there first",
            volume.id(),
            mount_point.display()
        ))),
    }
}

/// As much of it as a volume can have.
pub(super) fn whole_units(Bytes(bytes): Bytes) -> Bytes {
    Bytes(bytes - bytes % UNIT.0)
}
