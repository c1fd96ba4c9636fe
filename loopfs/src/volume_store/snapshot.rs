//! What a volume held at one moment, kept to make volumes of.

use std::ffi::CStr;
use std::os::fd::AsFd;
use std::time::{Duration, SystemTime};

use super::id::{SnapshotId, VolumeId};
use super::{ContentSource, OwnedContentSource, Volume, VolumeKind, VolumeStore, layout};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::xattr;
use crate::units::Bytes;

const NAME: &CStr = c"trusted.loopfs.snapshot";

/// A snapshot that was there when it was opened.
#[derive(Debug)]
pub struct Snapshot {
    id: SnapshotId,
    source: VolumeId,
    taken: Taken,
    /// Its directory or image, which is as that of a volume.
    pub(super) content: Volume,
}

/// What is recorded when a snapshot is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) created: SystemTime,
    /// Of the volume it was taken of, then.
    pub(super) capacity: Bytes,
}

impl Snapshot {
    /// Its name.
    #[must_use]
    pub fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// The volume it was taken of, whether that is still there or not.
    #[must_use]
    pub fn source(&self) -> &VolumeId {
        &self.source
    }

    /// Directory or image.
    #[must_use]
    pub fn kind(&self) -> VolumeKind {
        self.content.kind()
    }

    /// The capacity of its source when it was taken: the least that a volume made from it has.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        self.taken.capacity
    }

    /// When it was taken, by the clock of the node.
    #[must_use]
    pub fn created(&self) -> SystemTime {
        self.taken.created
    }

    /// What it holds, in constant time. Blocks that it shares with others count in full.
    ///
    /// # Errors
    /// Those of fstat(2) and quotactl_fd(2).
    pub fn used(&self) -> Result<Bytes> {
        self.content.stats().map(|stats| stats.used)
    }
}

impl VolumeStore {
    /// Opens a snapshot.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn snapshot(&self, id: &SnapshotId) -> Result<Snapshot> {
        let entry = ContentSource::Snapshot(id);
        let (kind, content) = self.open_entry(entry)?;
        let damaged = || {
            let detail = "it has no attribute that says what it was taken of; it was not made by the store";
            Error::new(ErrorKind::InvalidInput, "open", entry, detail)
        };
        let taken = Taken::read(&content)?.ok_or_else(damaged)?;
        let content = Volume::new(VolumeId::parse(id.as_str())?, kind, content)?;
        let Some(OwnedContentSource::Volume(source)) = content.source()? else { return Err(damaged()) };
        Ok(Snapshot { id: id.clone(), source, taken, content })
    }

    /// Ids of all snapshots, in no order.
    ///
    /// # Errors
    /// Those of getdents(2).
    pub fn snapshots(&self) -> Result<Vec<SnapshotId>> {
        let Some(snapshots) = &self.layout.snapshots else { return Ok(Vec::new()) };
        let names = layout::names(snapshots, "snapshots")?;
        Ok(names.iter().filter_map(|name| SnapshotId::parse(name).ok()).collect())
    }

    /// The snapshot of that id, if it was taken of `source`.
    pub(super) fn existing_snapshot(
        &self,
        id: &SnapshotId,
        source: ContentSource<'_>,
    ) -> Result<Option<Snapshot>> {
        let snapshot = match self.snapshot(id) {
            Ok(snapshot) => snapshot,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let found = ContentSource::Volume(snapshot.source());
        if found == source {
            return Ok(Some(snapshot));
        }
        let detail = format!("a snapshot of {found} has that id; one of {source} was asked");
        Err(Error::new(ErrorKind::AlreadyExists, "create snapshot", id, detail))
    }
}

/// Whether an image, in the trash perhaps, is that of a snapshot.
pub(super) fn is_one(image: impl AsFd) -> Result<bool> {
    Ok(xattr::get(image, NAME).context("read the attribute of", "an image")?.is_some())
}

impl Taken {
    pub(super) fn record(self, made: impl AsFd, entry: ContentSource<'_>) -> Result<()> {
        xattr::set(made, NAME, self.print().as_bytes()).context("set up", entry)
    }

    fn read(content: impl AsFd) -> Result<Option<Self>> {
        const OPERATION: &str = "read the attribute of";
        const OBJECT: &str = "a snapshot";
        let Some(value) = xattr::get(content, NAME).context(OPERATION, OBJECT)? else { return Ok(None) };
        let text = String::from_utf8_lossy(&value);
        Self::parse(&text).map(Some).ok_or_else(|| {
            Error::new(ErrorKind::Other, OPERATION, OBJECT, format!("{text:?} is not understood"))
        })
    }

    fn print(self) -> String {
        // A clock before 1970 is wrong, and no reason to take no snapshots.
        let created = self.created.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        format!("created={}.{:09} capacity={}", created.as_secs(), created.subsec_nanos(), self.capacity.0)
    }

    fn parse(text: &str) -> Option<Self> {
        let value = |key: &str| text.split(' ').find_map(|field| field.strip_prefix(key)?.strip_prefix('='));
        let (seconds, nanoseconds) = value("created")?.split_once('.')?;
        let nanoseconds = nanoseconds.parse().ok().filter(|nanoseconds| *nanoseconds < 1_000_000_000)?;
        let created = Duration::new(seconds.parse().ok()?, nanoseconds);
        Some(Self {
            created: SystemTime::UNIX_EPOCH.checked_add(created)?,
            capacity: Bytes(value("capacity")?.parse().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_recorded_reads_back(seconds in 0u64..1 << 40, nanoseconds in 0u32..1_000_000_000, capacity: u64) {
            let created = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanoseconds);
            let taken = Taken { created, capacity: Bytes(capacity) };
            prop_assert_eq!(Taken::parse(&taken.print()), Some(taken));
        }

        #[test]
        fn any_text_is_read(text in "(created=[0-9]{0,25}\\.[0-9]{0,12}|capacity=[0-9]{0,25}| |\\PC){0,6}") {
            Taken::parse(&text);
        }
    }
}
