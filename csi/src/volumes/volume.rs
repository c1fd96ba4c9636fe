//! One volume, as the calls describe it.

use loopfs::volume_store::{Condition, OwnedContentSource, Volume, VolumeId, VolumeKind};
use loopfs::{Bytes, FilesystemUuid};

use crate::error::{Error, Result};

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

/// Rounds a size down to a multiple of [`UNIT`].
pub(super) fn whole_units(Bytes(bytes): Bytes) -> Bytes {
    Bytes(bytes - bytes % UNIT.0)
}
