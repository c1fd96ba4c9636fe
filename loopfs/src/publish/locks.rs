//! Locks on volumes and targets, so that two calls of one process do not disturb each other.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::volume_store::VolumeId;

/// What a call changes. A call that locks both locks the volume first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum LockedObject {
    Volume(VolumeId),
    Target(PathBuf),
}

#[derive(Debug, Default)]
pub(super) struct Locks {
    locked: Mutex<HashSet<LockedObject>>,
    released: Condvar,
}

/// A locked object, until this is dropped.
#[must_use = "dropping the lock releases it"]
pub(super) struct Locked<'a> {
    locks: &'a Locks,
    object: LockedObject,
}

impl Locks {
    /// Waits until no other call has the object locked.
    pub(super) fn lock(&self, object: LockedObject) -> Locked<'_> {
        let mut locked = self.locked();
        while locked.contains(&object) {
            locked = self.released.wait(locked).unwrap_or_else(PoisonError::into_inner);
        }
        locked.insert(object.clone());
        Locked { locks: self, object }
    }

    fn locked(&self) -> MutexGuard<'_, HashSet<LockedObject>> {
        // Each critical section is a single change, so a panicked holder leaves the set whole.
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.locks.locked().remove(&self.object);
        self.locks.released.notify_all();
    }
}
