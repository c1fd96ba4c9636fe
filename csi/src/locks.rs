//! Locks on volumes, snapshots and target paths, so that two operations do not disturb each other.
//!
//! The CSI specification states that "the CO MAY issue multiple calls for the same volume" concurrently, and lets a
//! driver return ABORTED for the later call.
//!
//! A volume that is copied or expanded can be used, changed and copied concurrently, but not removed. An operation acquires
//! all its locks together or none of them, and waits for none. Two operations therefore cannot wait for each other.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use loopfs::volume_store::{OwnedContentSource, SnapshotId, VolumeId};
use tokio::sync::Notify;

/// The object of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum OperationObject {
    Volume(VolumeId),
    Snapshot(SnapshotId),
    /// The capacity of a volume, while it is expanded.
    Capacity(VolumeId),
    /// A path at which a volume is published.
    Target(PathBuf),
}

impl From<VolumeId> for OperationObject {
    fn from(id: VolumeId) -> Self {
        Self::Volume(id)
    }
}

impl From<SnapshotId> for OperationObject {
    fn from(id: SnapshotId) -> Self {
        Self::Snapshot(id)
    }
}

impl From<OwnedContentSource> for OperationObject {
    fn from(source: OwnedContentSource) -> Self {
        match source {
            OwnedContentSource::Volume(id) => Self::Volume(id),
            OwnedContentSource::Snapshot(id) => Self::Snapshot(id),
        }
    }
}

impl fmt::Display for OperationObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(id) => write!(f, "volume {id}"),
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
            Self::Capacity(id) => write!(f, "the capacity of volume {id}"),
            Self::Target(path) => write!(f, "target path {}", path.display()),
        }
    }
}

/// The effect of an operation on an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockMode {
    /// Creates or publishes it. Excludes all modes but [`Keep`](Self::Keep).
    Change,
    /// Removes it. Excludes all modes.
    Remove,
    /// Needs it to stay: copies its content, or expands it. Excludes [`Remove`](Self::Remove).
    Keep,
}

/// The locks of all operations that are in progress.
#[derive(Clone, Debug, Default)]
pub(crate) struct VolumeLocks {
    states: Arc<Mutex<HashMap<OperationObject, LockState>>>,
    released: Arc<Notify>,
}

/// The locks on one object.
#[derive(Debug, Default)]
struct LockState {
    /// The mode of the operation that changes or removes the object.
    exclusive: Option<LockMode>,
    /// The number of operations that need the object to stay.
    kept: usize,
}

/// The locks of one operation, released on drop. The work holds them, not the call: work continues after its client has
/// disconnected.
#[derive(Debug)]
#[must_use = "dropping the lock releases it"]
pub(crate) struct VolumeLock {
    locks: VolumeLocks,
    locked: Vec<(OperationObject, LockMode)>,
}

impl LockState {
    fn allows(&self, mode: LockMode) -> bool {
        match mode {
            LockMode::Change => self.exclusive.is_none(),
            LockMode::Remove => self.exclusive.is_none() && self.kept == 0,
            LockMode::Keep => self.exclusive != Some(LockMode::Remove),
        }
    }

    fn is_unlocked(&self) -> bool {
        self.exclusive.is_none() && self.kept == 0
    }
}

impl VolumeLocks {
    /// Locks all of these objects, or none of them.
    ///
    /// # Errors
    /// The object that another operation has locked.
    pub(crate) fn try_acquire(
        &self,
        requested: impl IntoIterator<Item = (OperationObject, LockMode)>,
    ) -> Result<VolumeLock, OperationObject> {
        let mut lock = VolumeLock { locks: self.clone(), locked: Vec::new() };
        for (object, mode) in requested {
            let mut states = self.states();
            let state = states.entry(object.clone()).or_default();
            if !state.allows(mode) {
                // Dropping `lock` releases the locks acquired so far, and needs the mutex for that.
                drop(states);
                return Err(object);
            }
            match mode {
                LockMode::Keep => state.kept += 1,
                LockMode::Change | LockMode::Remove => state.exclusive = Some(mode),
            }
            lock.locked.push((object, mode));
        }
        Ok(lock)
    }

    /// Waits until the object can be locked, and locks it. The caller must hold no other lock.
    pub(crate) async fn acquire(&self, object: OperationObject, mode: LockMode) -> VolumeLock {
        loop {
            // Enabled before the attempt, so that no release after the attempt is missed.
            let mut released = std::pin::pin!(self.released.notified());
            released.as_mut().enable();
            match self.try_acquire([(object.clone(), mode)]) {
                Ok(lock) => return lock,
                Err(_pending) => released.await,
            }
        }
    }

    /// A poisoned mutex is used all the same: the map is consistent after each single step.
    fn states(&self) -> MutexGuard<'_, HashMap<OperationObject, LockState>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for VolumeLock {
    fn drop(&mut self) {
        if self.locked.is_empty() {
            // A failed attempt releases nothing, and a notification would wake its own caller.
            return;
        }
        let mut states = self.locks.states();
        for (object, mode) in self.locked.drain(..) {
            let Some(state) = states.get_mut(&object) else { continue };
            match mode {
                LockMode::Keep => state.kept -= 1,
                LockMode::Change | LockMode::Remove => state.exclusive = None,
            }
            if state.is_unlocked() {
                states.remove(&object);
            }
        }
        drop(states);
        self.locks.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn volume(id: &str) -> OperationObject {
        OperationObject::Volume(VolumeId::parse(id).unwrap())
    }

    fn snapshot(id: &str) -> OperationObject {
        OperationObject::Snapshot(SnapshotId::parse(id).unwrap())
    }

    #[rstest]
    #[case::change_and_change(LockMode::Change, LockMode::Change, false)]
    #[case::change_and_remove(LockMode::Change, LockMode::Remove, false)]
    #[case::remove_and_remove(LockMode::Remove, LockMode::Remove, false)]
    #[case::keep_and_remove(LockMode::Keep, LockMode::Remove, false)]
    #[case::keep_and_change(LockMode::Keep, LockMode::Change, true)]
    #[case::keep_and_copy(LockMode::Keep, LockMode::Keep, true)]
    fn lock_modes_conflict_as_documented(
        #[case] first: LockMode,
        #[case] second: LockMode,
        #[case] together: bool,
    ) {
        for (first, second) in [(first, second), (second, first)] {
            let locks = VolumeLocks::default();
            let held = locks.try_acquire([(volume("a"), first)]).unwrap();
            match locks.try_acquire([(volume("a"), second)]) {
                Ok(_both) => assert!(together, "{first:?} and {second:?}"),
                Err(object) => assert!(!together && object == volume("a")),
            }
            // Operations on other objects proceed, even on a snapshot of the same name.
            drop(locks.try_acquire([(volume("b"), second), (snapshot("a"), second)]).unwrap());
            drop(held);
            drop(locks.try_acquire([(volume("a"), second)]).unwrap());
            assert!(locks.states().is_empty());
        }
    }

    #[test]
    fn a_failed_attempt_locks_nothing() {
        let locks = VolumeLocks::default();
        let held = locks.try_acquire([(volume("b"), LockMode::Change)]).unwrap();
        let wanted = || {
            [
                (volume("a"), LockMode::Change),
                (snapshot("s"), LockMode::Keep),
                (volume("b"), LockMode::Change),
            ]
        };
        assert_eq!(locks.try_acquire(wanted()).unwrap_err(), volume("b"));
        drop(
            locks.try_acquire([(volume("a"), LockMode::Remove), (snapshot("s"), LockMode::Remove)]).unwrap(),
        );
        drop(held);
        drop(locks.try_acquire(wanted()).unwrap());
        assert!(locks.states().is_empty());
    }

    /// It can change a volume and copy it.
    #[test]
    fn one_operation_can_hold_both_modes() {
        let locks = VolumeLocks::default();
        drop(locks.try_acquire([(volume("a"), LockMode::Change), (volume("a"), LockMode::Keep)]).unwrap());
        assert!(locks.states().is_empty());
    }

    #[test]
    fn last_copy_unlocks_its_source() {
        let locks = VolumeLocks::default();
        let copies = [0; 2].map(|_| locks.try_acquire([(snapshot("s"), LockMode::Keep)]).unwrap());
        for copy in copies {
            assert!(locks.try_acquire([(snapshot("s"), LockMode::Remove)]).is_err());
            drop(copy);
        }
        drop(locks.try_acquire([(snapshot("s"), LockMode::Remove)]).unwrap());
    }

    #[tokio::test]
    async fn acquire_waits_for_dropped_lock() {
        let locks = VolumeLocks::default();
        let held = locks.try_acquire([(volume("a"), LockMode::Change)]).unwrap();
        let waiting = locks.clone();
        let waiting = tokio::spawn(async move { waiting.acquire(volume("a"), LockMode::Change).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(held);
        drop(waiting.await.unwrap());
        assert!(locks.states().is_empty());
    }
}
