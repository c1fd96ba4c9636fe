//! Volumes that are being made, removed or copied right now.
//!
//! One task at a time creates or deletes a volume. Any number of tasks can copy it concurrently, but not while another task
//! creates or deletes it.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Mutex, MutexGuard, PoisonError},
};

use loopfs::volume_store::VolumeId;

/// The ids that tasks are at work on.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    ids: Mutex<HashMap<VolumeId, Work>>,
}

#[derive(Debug)]
enum Work {
    Exclusive,
    /// So many copies.
    Copies(usize),
}

/// The right to work on a volume until it is dropped.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    all: &'a InFlight,
    id: VolumeId,
}

impl InFlight {
    /// Returns the right to make or remove a volume, or `None` while another task works on it.
    pub(crate) fn enter(&self, id: &VolumeId) -> Option<Permit<'_>> {
        match self.lock().entry(id.clone()) {
            Entry::Vacant(entry) => entry.insert(Work::Exclusive),
            Entry::Occupied(_) => return None,
        };
        Some(Permit { all: self, id: id.clone() })
    }

    /// Returns the right to copy a volume, or `None` while another task makes or removes it.
    pub(crate) fn copy(&self, id: &VolumeId) -> Option<Permit<'_>> {
        match self.lock().entry(id.clone()).or_insert(Work::Copies(0)) {
            Work::Copies(count) => *count += 1,
            Work::Exclusive => return None,
        }
        Some(Permit { all: self, id: id.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<VolumeId, Work>> {
        // Every critical section is a single step on one entry, so a panicked holder leaves the map whole.
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut ids = self.all.lock();
        match ids.get_mut(&self.id) {
            Some(Work::Copies(count)) if *count > 1 => *count -= 1,
            _ => drop(ids.remove(&self.id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_task_at_a_time_has_a_volume_to_itself() {
        let (all, id) = (InFlight::default(), VolumeId::parse("pvc-1").unwrap());
        let first = all.enter(&id);
        assert!(first.is_some());
        assert!(all.enter(&id).is_none() && all.copy(&id).is_none());
        assert!(all.enter(&VolumeId::parse("pvc-2").unwrap()).is_some());
        drop(first);
        assert!(all.enter(&id).is_some());
    }

    #[test]
    fn copies_of_one_volume_share_it_and_keep_it_from_being_removed() {
        let (all, id) = (InFlight::default(), VolumeId::parse("pvc-1").unwrap());
        let copies = [all.copy(&id), all.copy(&id)];
        assert!(copies.iter().all(Option::is_some));
        let [first, last] = copies;
        drop(first);
        assert!(all.enter(&id).is_none());
        drop(last);
        assert!(all.enter(&id).is_some());
    }
}
