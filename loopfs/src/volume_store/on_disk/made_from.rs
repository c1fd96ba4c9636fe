//! What a volume or snapshot was made from, in an extended attribute of its directory or image.

use std::ffi::CStr;
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::attribute;
use crate::error::Result;
use crate::sys::xattr;
use crate::volume_store::id::{SnapshotId, VolumeId};
use crate::volume_store::source::{ContentSource, OwnedContentSource};

/// The attribute of a clone or snapshot: the id of the source volume, or `snapshot/` and the id of the source snapshot.
const NAME: &CStr = c"trusted.loopfs.source";
/// No id contains a slash.
const SNAPSHOT: &str = "snapshot/";

/// Records the source of a directory or image that has no name yet.
pub(crate) fn record(made: impl AsFd, source: ContentSource<'_>) -> Result<(), Errno> {
    xattr::set(made, NAME, text(source).as_bytes())
}

fn text(source: ContentSource<'_>) -> String {
    match source {
        ContentSource::Volume(id) => id.to_string(),
        ContentSource::Snapshot(id) => format!("{SNAPSHOT}{id}"),
    }
}

/// Reads the source of a directory or image. Returns `None` if it was created empty.
pub(crate) fn read(made: impl AsFd) -> Result<Option<OwnedContentSource>> {
    attribute::read(made, NAME, "read the source of", "a directory or image", |text| parse(text).ok())
}

fn parse(text: &str) -> Result<OwnedContentSource> {
    match text.strip_prefix(SNAPSHOT) {
        Some(id) => SnapshotId::parse(id).map(OwnedContentSource::Snapshot),
        None => VolumeId::parse(text).map(OwnedContentSource::Volume),
    }
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
        let source = parse(written).unwrap();
        assert_eq!(text(source.as_ref()), written);
        assert_eq!(source.to_string(), shown);
    }

    #[rstest]
    #[case("")]
    #[case("snapshot/")]
    #[case("volume/a")]
    #[case("snapshot/../a")]
    fn text_without_a_source_is_rejected(#[case] text: &str) {
        parse(text).unwrap_err();
    }
}
