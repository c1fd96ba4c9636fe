//! The data source of a claim: none, another claim of its namespace, or a VolumeSnapshot of its namespace.

mod claim;
pub(crate) mod snapshot;

use loopfs::Bytes;
use loopfs::volume_store::OwnedContentSource;

pub(crate) use self::claim::find_volume;
pub(crate) use self::snapshot::find_snapshot;

/// The volume or snapshot to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DataSource {
    pub(crate) id: OwnedContentSource,
    /// The volume mode; `None` if it is unknown.
    pub(crate) mode: Option<String>,
    /// The smallest capacity of a copy.
    pub(crate) capacity: Bytes,
}
