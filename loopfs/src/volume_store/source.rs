//! The source of a volume's content.

use std::fmt;

use super::id::{SnapshotId, VolumeId};

/// The source that a volume can be cloned from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContentSource<'a> {
    /// A volume, in its current state.
    Volume(&'a VolumeId),
    /// A snapshot.
    Snapshot(&'a SnapshotId),
}

/// The source that a volume was cloned from, which may have been deleted.
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
    /// Returns the source with borrowed ids.
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
