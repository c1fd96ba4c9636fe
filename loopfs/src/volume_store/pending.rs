//! Pending volumes, whose creator has not confirmed them.
//!
//! ```text
//!            create, clone                    confirm
//! (absent) ----------------> pending volume ----------> volume
//!     ^                            |                      |
//!     +----------------------------+----------------------+
//!                                delete
//! ```
//!
//! A program that records its volumes elsewhere creates each one as pending, records it, and confirms it. After a crash, a pending
//! volume is one that may not be recorded, and its creator decides what happens to it. The store itself never deletes one.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use super::id::VolumeId;
use super::on_disk::{Annotations, is_pending, remove_pending};
use super::source::ContentSource;
use super::spec::VolumeSpec;
use super::store::VolumeStore;
use crate::error::{Context, ErrorKind, Result};

/// The volumes that may be pending: `None` until all have been read. A volume is added after it has its name, and removed after it was
/// confirmed or deleted.
#[derive(Debug, Default)]
pub(super) struct PendingVolumes(Mutex<Option<BTreeSet<VolumeId>>>);

impl PendingVolumes {
    /// Adds a volume that was created with `spec`.
    pub(super) fn created(&self, id: &VolumeId, spec: &VolumeSpec) {
        if spec.pending {
            self.change(|ids| ids.insert(id.clone()));
        }
    }

    /// Removes a volume that was confirmed or deleted.
    pub(super) fn ended(&self, id: &VolumeId) {
        self.change(|ids| ids.remove(id));
    }

    fn change(&self, change: impl FnOnce(&mut BTreeSet<VolumeId>) -> bool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(change);
    }
}

impl VolumeStore {
    /// Confirms a volume that was created as [pending](super::VolumeSpec::pending), durably. The call can be repeated.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]. Those of fremovexattr(2) and fsync(2).
    pub fn confirm(&self, id: &VolumeId) -> Result<()> {
        let (_, content) = self.open_entry(ContentSource::Volume(id))?;
        remove_pending(content).context("confirm volume", id)?;
        self.layout.make_durable()?;
        self.pending.ended(id);
        Ok(())
    }

    /// Returns the pending volumes and their annotations, in the order of their ids. The first call reads all volumes, and later calls
    /// only those that were pending then, or that were created through this `VolumeStore` since. A volume that cannot be read is left
    /// out, because it may have been confirmed.
    ///
    /// # Errors
    /// Those of getdents(2).
    pub fn pending(&self) -> Result<Vec<(VolumeId, Annotations)>> {
        let mut ids = self.pending.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut candidates = match ids.take() {
            Some(candidates) => candidates,
            None => self.list()?.into_iter().collect(),
        };
        let mut pending = Vec::new();
        candidates.retain(|id| match self.annotations_if_pending(id) {
            Ok(None) => false,
            Ok(Some(annotations)) => {
                pending.push((id.clone(), annotations));
                true
            }
            Err(error) => error.kind() != ErrorKind::NotFound,
        });
        *ids = Some(candidates);
        Ok(pending)
    }

    fn annotations_if_pending(&self, id: &VolumeId) -> Result<Option<Annotations>> {
        let (_, content) = self.open_entry(ContentSource::Volume(id))?;
        if is_pending(&content)? { Annotations::read(&content).map(Some) } else { Ok(None) }
    }
}
