//! One operation at a time on a volume or snapshot. "The CO MAY issue multiple calls for the same volume", says the
//! specification, and lets a driver answer the later one with ABORTED.
//!
//! What is copied may be used and changed meanwhile, and copied several times at once, but not removed. An operation takes
//! all that it needs at once or nothing, and waits for nothing, so no two can wait for each other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::error::{Error, Result};
use crate::object::Object;

/// What an operation does to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Makes it, publishes it, grows it.
    Change,
    /// Takes it away.
    Remove,
    /// Makes something with its content.
    Copy,
}

/// The volumes and snapshots that an operation is running on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guards {
    busy: Arc<Mutex<HashMap<Object, Busy>>>,
    freed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Busy {
    /// By one operation that changes or removes it.
    held: Option<Use>,
    /// By so many that copy it.
    copies: usize,
}

/// Keeps what an operation needs to its holder until dropped. It goes with the work, not with the call: a client that
/// hangs up does not stop work that is under way.
#[derive(Debug)]
#[must_use = "it is free again once this is dropped"]
pub(crate) struct Guard {
    guards: Guards,
    holds: Vec<(Object, Use)>,
}

impl Busy {
    fn allows(&self, wanted: Use) -> bool {
        match wanted {
            Use::Change => self.held.is_none(),
            Use::Remove => self.held.is_none() && self.copies == 0,
            Use::Copy => self.held != Some(Use::Remove),
        }
    }
}

impl Guards {
    /// All of them, or an error that names one that is busy.
    pub(crate) fn acquire(&self, wanted: impl IntoIterator<Item = (Object, Use)>) -> Result<Guard> {
        let mut guard = Guard { guards: self.clone(), holds: Vec::new() };
        for (object, wanted) in wanted {
            let mut all = self.busy();
            let busy = all.entry(object.clone()).or_default();
            if !busy.allows(wanted) {
                // What was taken so far goes with the guard, which takes the lock for that.
                drop(all);
                return Err(Error::InProgress(object));
            }
            match wanted {
                Use::Copy => busy.copies += 1,
                Use::Change | Use::Remove => busy.held = Some(wanted),
            }
            guard.holds.push((object, wanted));
        }
        Ok(guard)
    }

    /// As [`acquire`](Self::acquire) of one object, and waits until that is possible. The caller must hold no other guard.
    pub(crate) async fn acquire_when_free(&self, object: Object, wanted: Use) -> Guard {
        loop {
            // Before the attempt, so that a guard dropped after it is not missed.
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            match self.acquire([(object.clone(), wanted)]) {
                Ok(guard) => return guard,
                Err(_busy) => freed.await,
            }
        }
    }

    /// The map is right after every single step, so a panic elsewhere has not spoilt it.
    fn busy(&self) -> MutexGuard<'_, HashMap<Object, Busy>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.holds.is_empty() {
            // An attempt that failed. It frees nothing, and would wake up the one that made it.
            return;
        }
        let mut all = self.guards.busy();
        for (object, held) in self.holds.drain(..) {
            let Some(busy) = all.get_mut(&object) else { continue };
            match held {
                Use::Copy => busy.copies -= 1,
                Use::Change | Use::Remove => busy.held = None,
            }
            if busy.held.is_none() && busy.copies == 0 {
                all.remove(&object);
            }
        }
        drop(all);
        self.guards.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use loopfs::{SnapshotId, VolumeId};
    use rstest::rstest;

    use super::*;

    fn volume(id: &str) -> Object {
        Object::Volume(VolumeId::parse(id).unwrap())
    }

    fn snapshot(id: &str) -> Object {
        Object::Snapshot(SnapshotId::parse(id).unwrap())
    }

    #[rstest]
    #[case::change_and_change(Use::Change, Use::Change, false)]
    #[case::change_and_remove(Use::Change, Use::Remove, false)]
    #[case::remove_and_remove(Use::Remove, Use::Remove, false)]
    #[case::copy_and_remove(Use::Copy, Use::Remove, false)]
    #[case::copy_and_change(Use::Copy, Use::Change, true)]
    #[case::copy_and_copy(Use::Copy, Use::Copy, true)]
    fn two_operations_on_one_volume(#[case] first: Use, #[case] second: Use, #[case] together: bool) {
        for (first, second) in [(first, second), (second, first)] {
            let guards = Guards::default();
            let held = guards.acquire([(volume("a"), first)]).unwrap();
            match guards.acquire([(volume("a"), second)]) {
                Ok(_both) => assert!(together, "{first:?} and {second:?}"),
                Err(Error::InProgress(object)) => assert!(!together && object == volume("a")),
                Err(error) => panic!("{error}"),
            }
            // Nobody else is hindered, least of all a snapshot of the same name.
            drop(guards.acquire([(volume("b"), second), (snapshot("a"), second)]).unwrap());
            drop(held);
            drop(guards.acquire([(volume("a"), second)]).unwrap());
            assert!(guards.busy().is_empty());
        }
    }

    #[test]
    fn all_or_nothing() {
        let guards = Guards::default();
        let held = guards.acquire([(volume("b"), Use::Change)]).unwrap();
        let wanted = || [(volume("a"), Use::Change), (snapshot("s"), Use::Copy), (volume("b"), Use::Change)];
        assert!(matches!(guards.acquire(wanted()), Err(Error::InProgress(object)) if object == volume("b")));
        drop(guards.acquire([(volume("a"), Use::Remove), (snapshot("s"), Use::Remove)]).unwrap());
        drop(held);
        drop(guards.acquire(wanted()).unwrap());
        assert!(guards.busy().is_empty());
    }

    #[test]
    fn a_volume_that_is_made_of_itself_is_nobody_s_deadlock() {
        let guards = Guards::default();
        drop(guards.acquire([(volume("a"), Use::Change), (volume("a"), Use::Copy)]).unwrap());
        assert!(guards.busy().is_empty());
    }

    #[test]
    fn the_last_of_several_copies_frees_the_source() {
        let guards = Guards::default();
        let copies = [0; 2].map(|_| guards.acquire([(snapshot("s"), Use::Copy)]).unwrap());
        for copy in copies {
            assert!(guards.acquire([(snapshot("s"), Use::Remove)]).is_err());
            drop(copy);
        }
        drop(guards.acquire([(snapshot("s"), Use::Remove)]).unwrap());
    }

    #[tokio::test]
    async fn waiting_for_a_volume_ends_when_its_guard_is_dropped() {
        let guards = Guards::default();
        let held = guards.acquire([(volume("a"), Use::Change)]).unwrap();
        let waiting = guards.clone();
        let waiting = tokio::spawn(async move { waiting.acquire_when_free(volume("a"), Use::Change).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(held);
        drop(waiting.await.unwrap());
        assert!(guards.busy().is_empty());
    }

    #[test]
    fn a_panic_frees_the_volume() {
        let guards = Guards::default();
        let held = guards.acquire([(volume("a"), Use::Change)]).unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = held;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert!(guards.acquire([(volume("a"), Use::Change)]).is_ok());
    }
}
