//! Locks between the threads of a process, each on an object such as a file or a volume.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::deadline::Deadline;

/// The objects that a thread has locked.
#[derive(Debug)]
pub(crate) struct KeyedLocks<K> {
    state: Mutex<State<K>>,
    released: Condvar,
}

#[derive(Debug)]
struct State<K> {
    locked: HashSet<K>,
    /// Threads that wait for an object. Waking none would be a system call all the same.
    waiting: usize,
}

/// A locked object, until this is dropped.
#[must_use = "dropping the lock releases it"]
pub(crate) struct KeyedLock<'a, K: Eq + Hash> {
    locks: &'a KeyedLocks<K>,
    pub(crate) key: K,
}

impl<K> Default for KeyedLocks<K> {
    fn default() -> Self {
        let state = State { locked: HashSet::new(), waiting: 0 };
        Self { state: Mutex::new(state), released: Condvar::new() }
    }
}

impl<K: Clone + Eq + Hash> KeyedLocks<K> {
    /// Waits until no other thread has the object locked.
    #[cfg(feature = "publish")]
    pub(crate) fn lock(&self, key: K) -> KeyedLock<'_, K> {
        loop {
            if let Some(locked) = self.lock_until(key.clone(), Deadline::after(std::time::Duration::MAX)) {
                return locked;
            }
        }
    }

    /// Waits until no other thread has the object locked. Returns `None` if one still has it at the deadline.
    pub(crate) fn lock_until(&self, key: K, deadline: Deadline) -> Option<KeyedLock<'_, K>> {
        let mut state = self.state();
        while state.locked.contains(&key) {
            let left = deadline.left();
            if left.is_zero() {
                return None;
            }
            state.waiting += 1;
            (state, _) = self.released.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        state.locked.insert(key.clone());
        Some(KeyedLock { locks: self, key })
    }
}

impl<K> KeyedLocks<K> {
    fn state(&self) -> MutexGuard<'_, State<K>> {
        // A panic leaves the set consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash> Drop for KeyedLock<'_, K> {
    fn drop(&mut self) {
        let mut state = self.locks.state();
        state.locked.remove(&self.key);
        if state.waiting > 0 {
            self.locks.released.notify_all();
        }
    }
}
