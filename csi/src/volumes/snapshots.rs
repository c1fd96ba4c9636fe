//! Creating, listing and deleting snapshots. `provision.rs` creates volumes from them.

use loopfs::ErrorKind;
use loopfs::publish::Publisher;
use loopfs::volume_store::{Snapshot, SnapshotId};

use super::publish::Volumes;
use crate::error::{Error, Result};
use crate::request::{CreateSnapshot, Filter, ListSnapshots, PageToken};

/// A part of the list of snapshots.
#[derive(Debug)]
pub(crate) struct SnapshotPage {
    pub(crate) snapshots: Vec<Snapshot>,
    /// The token of the next page. `None` if this is the last page.
    pub(crate) next: Option<PageToken<SnapshotId>>,
}

impl Volumes {
    /// Creates a snapshot, or returns the existing one if it has the requested source.
    pub(crate) fn create_snapshot(&self, create: &CreateSnapshot) -> Result<Snapshot> {
        let CreateSnapshot { snapshot: id, source, accessible_here } = create;
        let publisher = self.monitor.verified()?;
        let found = existing(&publisher, id)?;
        if !accessible_here {
            let text = format!("accessibility_requirements: snapshot {id} must be on other nodes");
            return Err(match found {
                Some(_) => Error::Incompatible(format!("{text}, but it exists on this node")),
                None => Error::NotOnThisNode(format!(
                    "{text}, but this driver creates snapshots only on its own node"
                )),
            });
        }
        if found.is_none() {
            let volume = publisher.store().volume(source).map_err(|error| match error.kind() {
                ErrorKind::NotFound => Error::SourceNotFound(format!("source_volume_id: {error}")),
                _ => error.into(),
            })?;
            publisher.flush(&volume)?;
        }
        // This call is repeated for an existing snapshot: the process that created it may have died before the snapshot
        // was durable.
        let created = publisher.store().create_snapshot(source, id).map_err(|error| match error.kind() {
            ErrorKind::NoSpace => Error::NotOnThisNode(error.to_string()),
            _ => error.into(),
        })?;
        self.changes.space();
        Ok(created)
    }

    /// Deletes a snapshot. Volumes that were created from it are unaffected. Its space is freed in the background.
    pub(crate) fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        let publisher = self.monitor.verified()?;
        publisher.store().delete_snapshot(id)?;
        self.trash_cleanup.request();
        self.changes.space();
        Ok(())
    }

    pub(crate) fn snapshot(&self, id: &SnapshotId) -> Result<Snapshot> {
        let publisher = self.monitor.verified()?;
        existing(&publisher, id)?.ok_or_else(|| Error::NoSuchSnapshot(id.clone()))
    }

    /// Returns the matching snapshots in the order of their ids. Skips and logs snapshots that cannot be read: the
    /// response has no field for such an error, and one unreadable snapshot must not hide the others.
    pub(crate) fn list_snapshots(&self, list: &ListSnapshots) -> Result<SnapshotPage> {
        let publisher = self.monitor.verified()?;
        let ListSnapshots { list, filter } = list;
        let Some(Filter { snapshot, source }) = filter else {
            return Ok(SnapshotPage { snapshots: Vec::new(), next: None });
        };
        let mut ids = match snapshot {
            Some(id) => vec![id.clone()],
            None => publisher.store().snapshots()?,
        };
        if let Some(PageToken(last)) = &list.from {
            ids.retain(|id| id > last);
        }
        ids.sort_unstable();
        let mut snapshots = ids
            .iter()
            .filter_map(|id| readable(&publisher, id))
            .filter(|snapshot| source.as_ref().is_none_or(|source| snapshot.source() == source))
            .peekable();
        let mut page: Vec<Snapshot> = Vec::new();
        while list.max_entries.is_none_or(|max_entries| page.len() < max_entries)
            && let Some(snapshot) = snapshots.next()
        {
            page.push(snapshot);
        }
        let next = snapshots.peek().and(page.last()).map(|last| PageToken(last.id().clone()));
        Ok(SnapshotPage { snapshots: page, next })
    }
}

fn existing(publisher: &Publisher, id: &SnapshotId) -> Result<Option<Snapshot>> {
    match publisher.store().snapshot(id) {
        Ok(snapshot) => Ok(Some(snapshot)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn readable(publisher: &Publisher, id: &SnapshotId) -> Option<Snapshot> {
    existing(publisher, id).unwrap_or_else(|error| {
        tracing::warn!(snapshot = %id, %error, "skipped a snapshot that cannot be read");
        None
    })
}
