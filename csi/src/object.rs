//! The objects of operations: volumes, snapshots and target paths.

use std::fmt;
use std::path::PathBuf;

use loopfs::volume_store::{OwnedContentSource, SnapshotId, VolumeId};

/// The object of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum OperationObject {
    Volume(VolumeId),
    Snapshot(SnapshotId),
    /// The capacity of a volume, while it is expanded.
    Capacity(VolumeId),
    /// A path at which a volume is published.
    Target(PathBuf),
}

impl From<VolumeId> for OperationObject {
    fn from(id: VolumeId) -> Self {
        Self::Volume(id)
    }
}

impl From<SnapshotId> for OperationObject {
    fn from(id: SnapshotId) -> Self {
        Self::Snapshot(id)
    }
}

impl From<OwnedContentSource> for OperationObject {
    fn from(source: OwnedContentSource) -> Self {
        match source {
            OwnedContentSource::Volume(id) => Self::Volume(id),
            OwnedContentSource::Snapshot(id) => Self::Snapshot(id),
        }
    }
}

impl fmt::Display for OperationObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(id) => write!(f, "volume {id}"),
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
            Self::Capacity(id) => write!(f, "the capacity of volume {id}"),
            Self::Target(path) => write!(f, "target path {}", path.display()),
        }
    }
}
