//! What a volume or snapshot was made from, and when a snapshot was taken and of what size, in extended attributes of its directory or
//! image.

use std::ffi::CStr;
use std::os::fd::AsFd;
use std::time::{Duration, SystemTime};

use nix::errno::Errno;

use super::attribute::{self, field};
use crate::error::{Context, Result};
use crate::sys::xattr;
use crate::units::Bytes;
use crate::volume_store::id::{SnapshotId, VolumeId};
use crate::volume_store::source::{ContentSource, OwnedContentSource};

/// The attribute of a clone or snapshot: the id of the source volume, or `snapshot/` and the id of the source snapshot.
const NAME: &CStr = c"trusted.loopfs.source";
/// The attribute of a snapshot.
const TAKEN: &CStr = c"trusted.loopfs.snapshot";
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

/// The facts that are recorded when a snapshot is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) created: SystemTime,
    /// The capacity of the source at that time.
    pub(crate) capacity: Bytes,
}

/// Returns `true` if an image, which may be in the trash, is that of a snapshot.
pub(crate) fn is_snapshot(image: impl AsFd) -> Result<bool> {
    attribute::is_set(image, TAKEN, "an image")
}

impl Taken {
    pub(crate) fn record(self, made: impl AsFd, entry: ContentSource<'_>) -> Result<()> {
        xattr::set(made, TAKEN, self.print().as_bytes()).context("set up", entry)
    }

    pub(crate) fn read(content: impl AsFd) -> Result<Option<Self>> {
        attribute::read(content, TAKEN, "read the attribute of", "a snapshot", Self::parse)
    }

    fn print(self) -> String {
        // A clock that is set to a time before 1970 is wrong, but snapshots must still be possible.
        let created = self.created.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        format!("created={}.{:09} capacity={}", created.as_secs(), created.subsec_nanos(), self.capacity.0)
    }

    fn parse(text: &str) -> Option<Self> {
        let (seconds, nanoseconds) = field(text, "created")?.split_once('.')?;
        let nanoseconds = nanoseconds.parse().ok().filter(|nanoseconds| *nanoseconds < 1_000_000_000)?;
        let created = Duration::new(seconds.parse().ok()?, nanoseconds);
        Some(Self {
            created: SystemTime::UNIX_EPOCH.checked_add(created)?,
            capacity: Bytes(field(text, "capacity")?.parse().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
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

    proptest! {
        #[test]
        fn the_record_reads_back_as_printed(seconds in 0u64..1 << 40, nanoseconds in 0u32..1_000_000_000, capacity: u64) {
            let created = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanoseconds);
            let taken = Taken { created, capacity: Bytes(capacity) };
            prop_assert_eq!(Taken::parse(&taken.print()), Some(taken));
        }

        #[test]
        fn parsing_any_text_does_not_panic(text in "(created=[0-9]{0,25}\\.[0-9]{0,12}|capacity=[0-9]{0,25}| |\\PC){0,6}") {
            Taken::parse(&text);
        }
    }
}
