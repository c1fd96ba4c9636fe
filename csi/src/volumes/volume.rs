//! One volume: how operations find it, describe it, and determine where it is published.

use std::path::PathBuf;

use loopfs::mount::KnownMount;
use loopfs::volume_store::{
    AbnormalReason, Condition, OwnedContentSource, Volume, VolumeId, VolumeKind, VolumeStats,
};
use loopfs::{Bytes, ErrorKind, FilesystemUuid};
use nix::sys::stat::FileStat;

use super::block_device::BlockVolume;
use super::directory::Directory;
use crate::error::{Error, Result};
use crate::mounted_devices::MountedDevices;
use crate::storage::Storage;

/// The sizes of volumes are multiples of this size, which is also the minimum.
pub(crate) const UNIT: Bytes = Bytes(4096);

/// A volume as the RPCs report it.
#[derive(Clone, Debug)]
pub(crate) struct VolumeInfo {
    pub(crate) volume: VolumeId,
    /// `None` if the capacity cannot be determined.
    pub(crate) capacity: Option<Bytes>,
    /// `None` if the storage is unavailable.
    pub(crate) filesystem: Option<FilesystemUuid>,
    /// `true` if the volume is published on this node.
    pub(crate) published: bool,
    pub(crate) condition: Condition,
    /// The volume or snapshot from which this volume was created. It may no longer exist.
    pub(crate) source: Option<OwnedContentSource>,
}

/// The result of a search for a volume whose devices and records are to be removed.
pub(super) enum TeardownTarget {
    Block(Volume),
    /// A Filesystem volume, which has no loop devices.
    WithoutDevices,
    Deleted,
}

pub(super) fn find(storage: &Storage, volume: &VolumeId) -> Result<TeardownTarget> {
    match storage.store.volume(volume) {
        Ok(volume) if volume.kind() == VolumeKind::Block => Ok(TeardownTarget::Block(volume)),
        Ok(_directory) => Ok(TeardownTarget::WithoutDevices),
        Err(error) => match error.kind() {
            ErrorKind::NotFound => Ok(TeardownTarget::Deleted),
            // The store returns these errors only for directories: for one without limits, and for one without the
            // store's mark.
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
        "{requested} access is requested for {}, which is a {} volume",
        volume.id(),
        volume.kind()
    )))
}

/// Returns the use, capacity and condition of a volume. The condition includes that of its loop devices.
pub(super) fn stats_including_devices(volume: &Volume, storage: &Storage) -> Result<VolumeStats> {
    let mut stats = volume.stats()?;
    // A changed device is a tenant's doing, a lack of space is not.
    let is_intact = matches!(
        &stats.condition,
        Condition::Healthy | Condition::Abnormal { reason: AbnormalReason::SpaceTaken, .. }
    );
    if volume.kind() == VolumeKind::Block
        && is_intact
        && let Some(problem) = BlockVolume::open(volume, storage)?.problem()?
    {
        stats.condition = Condition::abnormal(AbnormalReason::DeviceChanged, problem);
    }
    Ok(stats)
}

/// Returns `true` if a path with this status is the directory or a device of the volume.
pub(super) fn is_at(volume: &Volume, storage: &Storage, status: &FileStat) -> Result<bool> {
    match volume.kind() {
        VolumeKind::Filesystem => Ok(Directory::open(volume)?.matches(status)),
        VolumeKind::Block => Ok(BlockVolume::open(volume, storage)?.device_of(status)?.is_some()),
    }
}

/// Returns a mount point among `mounts` at which the volume is published.
pub(super) fn published_at(
    volume: &Volume,
    storage: &Storage,
    mounts: &[KnownMount],
    mounted: &MountedDevices,
) -> Result<Option<PathBuf>> {
    match volume.kind() {
        VolumeKind::Filesystem => Ok(Directory::open(volume)?.published_at(mounts, None)),
        VolumeKind::Block => BlockVolume::open(volume, storage)?.published_at(mounted, None),
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

/// Rounds a size down to a multiple of [`UNIT`].
pub(super) fn whole_units(Bytes(bytes): Bytes) -> Bytes {
    Bytes(bytes - bytes % UNIT.0)
}
