//! Volumes that are being made or unmade right now, each by one task at a time.

use std::{
    collections::HashSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

use loopfs::VolumeId;

/// The ids somebody is at work on.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    ids: Mutex<HashSet<VolumeId>>,
}

/// The right to work on a volume until it is dropped.
#[derive(Debug)]
pub(crate) struct Exclusive<'a> {
    all: &'a InFlight,
    id: VolumeId,
}

impl InFlight {
    /// The right to work on a volume, or `None` while somebody else has it.
    pub(crate) fn enter(&self, id: &VolumeId) -> Option<Exclusive<'_>> {
        self.lock().insert(id.clone()).then(|| Exclusive { all: self, id: id.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<VolumeId>> {
        // Every critical section is a single set operation, so a panicked holder leaves the set whole.
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let (all, id) = (InFlight::default(), VolumeId::parse("pvc-1").unwrap());
        let first = all.enter(&id);
        assert!(first.is_some());
        assert!(all.enter(&id).is_none());
        assert!(all.enter(&VolumeId::parse("pvc-2").unwrap()).is_some());
        drop(first);
        assert!(all.enter(&id).is_some());
    }
}
