//! Where the content of a volume comes from.

use std::ffi::CStr;
use std::fmt;
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::id::{SnapshotId, VolumeId};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::xattr;

/// On what was made from a volume or a snapshot: the id of the volume, or `snapshot/` and the id of the snapshot.
const NAME: &CStr = c"trusted.loopfs.source";
/// No id has a slash.
const SNAPSHOT: &str = "snapshot/";

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

    fn parse(text: &str) -> Result<Self> {
        match text.strip_prefix(SNAPSHOT) {
            Some(id) => SnapshotId::parse(id).map(Self::Snapshot),
            None => VolumeId::parse(text).map(Self::Volume),
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

/// Says what a directory or an image, which has no name yet, is made from.
pub(super) fn record(made: impl AsFd, source: ContentSource<'_>) -> Result<(), Errno> {
    xattr::set(made, NAME, text(source).as_bytes())
}

fn text(source: ContentSource<'_>) -> String {
    match source {
        ContentSource::Volume(id) => id.to_string(),
        ContentSource::Snapshot(id) => format!("{SNAPSHOT}{id}"),
    }
}

/// What a directory or an image was made from; None where it was made empty.
pub(super) fn read(made: impl AsFd) -> Result<Option<OwnedContentSource>> {
    const OPERATION: &str = "read the source of";
    const OBJECT: &str = "a directory or image";
    let Some(value) = xattr::get(made, NAME).context(OPERATION, OBJECT)? else { return Ok(None) };
    let source = OwnedContentSource::parse(&String::from_utf8_lossy(&value));
    source.map(Some).map_err(|error| Error::new(ErrorKind::Other, OPERATION, OBJECT, error))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a", "volume a")]
    #[case("snapshot", "volume snapshot")]
    #[case("snapshot/a", "snapshot a")]
    fn a_source_reads_back_as_written(#[case] written: &str, #[case] shown: &str) {
        let source = OwnedContentSource::parse(written).unwrap();
        assert_eq!(text(source.as_ref()), written);
        assert_eq!(source.to_string(), shown);
    }

    #[rstest]
    #[case("")]
    #[case("snapshot/")]
    #[case("volume/a")]
    #[case("snapshot/../a")]
    fn what_is_no_source_is_not_taken_for_one(#[case] text: &str) {
        OwnedContentSource::parse(text).unwrap_err();
    }
}
