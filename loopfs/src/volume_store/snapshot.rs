//! Snapshots: the content of a volume at one moment, to clone volumes from.

use std::time::SystemTime;

use super::id::{SnapshotId, VolumeId};
use super::on_disk::{Taken, layout};
use super::source::{ContentSource, OwnedContentSource};
use super::spec::VolumeKind;
use super::store::{VolumeStore, if_found};
use super::volume::Volume;
use crate::error::{Error, ErrorKind, Result};
use crate::units::Bytes;

/// An open snapshot.
#[derive(Debug)]
pub struct Snapshot {
    id: SnapshotId,
    source: VolumeId,
    taken: Taken,
    /// Its directory or image, in the form of a volume.
    pub(super) content: Volume,
}

impl Snapshot {
    /// Returns the id.
    #[must_use]
    pub fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// Returns the id of the source volume, which may have been deleted.
    #[must_use]
    pub fn source(&self) -> &VolumeId {
        &self.source
    }

    /// Returns the kind: directory or image.
    #[must_use]
    pub fn kind(&self) -> VolumeKind {
        self.content.kind()
    }

    /// Returns the capacity of its source when the snapshot was taken: the least capacity of a clone of it.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        self.taken.capacity
    }

    /// Returns when the snapshot was taken, by the clock of the node.
    #[must_use]
    pub fn created(&self) -> SystemTime {
        self.taken.created
    }

    /// Returns the used bytes, in constant time. Shared blocks count in full.
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
            let detail =
                "it lacks the extended attributes that record its source; the store did not create it";
            Error::new(ErrorKind::InvalidInput, "open", entry, detail)
        };
        let taken = Taken::read(&content)?.ok_or_else(damaged)?;
        let content = Volume::new(VolumeId::parse(id.as_str())?, kind, content)?;
        let Some(OwnedContentSource::Volume(source)) = content.source()? else { return Err(damaged()) };
        Ok(Snapshot { id: id.clone(), source, taken, content })
    }

    /// Returns the ids of all snapshots, in no particular order.
    ///
    /// # Errors
    /// Those of getdents(2).
    pub fn snapshots(&self) -> Result<Vec<SnapshotId>> {
        let names = layout::names(&self.layout.snapshots, "snapshots")?;
        Ok(names.iter().filter_map(|name| SnapshotId::parse(name).ok()).collect())
    }

    /// Returns the snapshot of that id if it exists and was taken of `source`.
    pub(super) fn existing_snapshot(
        &self,
        id: &SnapshotId,
        source: ContentSource<'_>,
    ) -> Result<Option<Snapshot>> {
        let Some(snapshot) = if_found(self.snapshot(id))? else { return Ok(None) };
        let found = ContentSource::Volume(snapshot.source());
        if found == source {
            return Ok(Some(snapshot));
        }
        let detail = format!("a snapshot of {found} has this id, but a snapshot of {source} is requested");
        Err(Error::new(ErrorKind::AlreadyExists, "create snapshot", id, detail))
    }
}
