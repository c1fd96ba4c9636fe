//! Where the content of a volume comes from.

use std::fmt;

use super::id::{SnapshotId, VolumeId};

/// What a volume can be made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContentSource<'a> {
    /// A volume, as it is now.
    Volume(&'a VolumeId),
    /// A snapshot.
    Snapshot(&'a SnapshotId),
}

/// What a volume was made from, whether that is still there or not.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum OwnedContentSource {
    /// A volume.
    Volume(VolumeId),
    /// A snapshot.
    Snapshot(SnapshotId),
}

impl<'a> ContentSource<'a> {
    pub(super) fn id(self) -> &'a str {
        match self {
            Self::Volume(id) => id.as_str(),
            Self::Snapshot(id) => id.as_str(),
        }
    }
}

impl OwnedContentSource {
    /// The same, borrowed.
    #[must_use]
    pub fn as_ref(&self) -> ContentSource<'_> {
        match self {
            Self::Volume(id) => ContentSource::Volume(id),
            Self::Snapshot(id) => ContentSource::Snapshot(id),
        }
    }
}

impl fmt::Display for ContentSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(id) => write!(f, "volume {id}"),
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
        }
    }
}

impl fmt::Display for OwnedContentSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_ref().fmt(f)
    }
}
