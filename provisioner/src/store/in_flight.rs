//! Locks on the volumes that tasks of this process are creating, deleting or copying.
//!
//! One task at a time creates or deletes a volume. Any number of tasks can copy it concurrently, but not while another task
//! creates or deletes it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use loopfs::volume_store::VolumeId;
use parking_lot::Mutex;

/// The locked volumes, by id.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    ids: Mutex<HashMap<VolumeId, Work>>,
}

#[derive(Debug)]
enum Work {
    /// One task creates or deletes the volume.
    Exclusive,
    /// This many tasks copy the volume.
    Copies(usize),
}

/// A lock on a volume, held until this is dropped.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    all: &'a InFlight,
    id: VolumeId,
}

impl InFlight {
    /// Locks a volume in order to create or delete it. Returns `None` while another task works on it.
    pub(crate) fn enter(&self, id: &VolumeId) -> Option<Permit<'_>> {
        match self.ids.lock().entry(id.clone()) {
            Entry::Vacant(entry) => entry.insert(Work::Exclusive),
            Entry::Occupied(_) => return None,
        };
        Some(Permit { all: self, id: id.clone() })
    }

    /// Locks a volume in order to copy it. Returns `None` while another task creates or deletes it.
    pub(crate) fn copy(&self, id: &VolumeId) -> Option<Permit<'_>> {
        match self.ids.lock().entry(id.clone()).or_insert(Work::Copies(0)) {
            Work::Copies(count) => *count += 1,
            Work::Exclusive => return None,
        }
        Some(Permit { all: self, id: id.clone() })
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut ids = self.all.ids.lock();
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
    fn exclusive_lock_excludes_all_others() {
        let (all, id) = (InFlight::default(), VolumeId::parse("pvc-1").unwrap());
        let first = all.enter(&id);
        assert!(first.is_some());
        assert!(all.enter(&id).is_none() && all.copy(&id).is_none());
        assert!(all.enter(&VolumeId::parse("pvc-2").unwrap()).is_some());
        drop(first);
        assert!(all.enter(&id).is_some());
    }

    #[test]
    fn copies_share_and_exclude_deletion() {
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
