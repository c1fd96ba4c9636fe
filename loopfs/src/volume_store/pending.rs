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
use super::on_disk::Annotations;
use super::spec::VolumeSpec;
use crate::error::{ErrorKind, Result};

/// The volumes that may be pending: `None` until all have been read. A volume is added after it has its name, and removed by the next
/// reading after it was confirmed or deleted.
#[derive(Debug, Default)]
pub(super) struct PendingVolumes(Mutex<Option<BTreeSet<VolumeId>>>);

impl PendingVolumes {
    /// Adds a volume that was created with `spec`.
    pub(super) fn created(&self, id: &VolumeId, spec: &VolumeSpec) {
        if spec.pending {
            let mut ids = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            ids.as_mut().map(|ids| ids.insert(id.clone()));
        }
    }

    /// Returns the pending volumes and their annotations, in the order of their ids. `all` lists all volumes, for the first call, and
    /// `read` returns the annotations of a volume if it is pending.
    pub(super) fn read(
        &self,
        all: impl FnOnce() -> Result<Vec<VolumeId>>,
        read: impl Fn(&VolumeId) -> Result<Option<Annotations>>,
    ) -> Result<Vec<(VolumeId, Annotations)>> {
        let mut ids = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut candidates = match ids.take() {
            Some(candidates) => candidates,
            None => all()?.into_iter().collect(),
        };
        let mut pending = Vec::new();
        candidates.retain(|id| match read(id) {
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
}
