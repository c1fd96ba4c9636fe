//! The source of a copy in the store.

use loopfs::Bytes;
use loopfs::volume_store::OwnedContentSource;

/// The volume or snapshot to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DataSource {
    pub(crate) id: OwnedContentSource,
    /// The volume mode; `None` if it is unknown.
    pub(crate) mode: Option<String>,
    /// The smallest capacity of a copy.
    pub(crate) capacity: Bytes,
}
