//! Pending volumes, whose creator has not confirmed them.
//!
//! ```text
//!            create, clone                confirm, publish
//! (absent) ----------------> pending volume ----------> volume
//!     ^                            |                      |
//!     +----------------------------+----------------------+
//!                                delete
//! ```
//!
//! A program that records its volumes elsewhere creates each one as pending, records it, and confirms it. After a crash, a pending
//! volume is one that may not be recorded, and its creator decides what happens to it. The store itself never deletes one. A volume that
//! is published is confirmed before, because it may hold data from then on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::id::VolumeId;
use super::on_disk::Annotations;
use crate::error::{ErrorKind, Result};

/// The interval at which all volumes are read: another process may have created some.
const INTERVAL: Duration = Duration::from_secs(300);

/// The volumes that may be pending.
#[derive(Debug, Default)]
pub(super) struct PendingVolumes(Mutex<Candidates>);

#[derive(Debug, Default)]
struct Candidates {
    /// Each volume with the number of its addition.
    ids: BTreeMap<VolumeId, u64>,
    additions: u64,
    /// When all volumes were read last.
    all_read: Option<Instant>,
}

impl PendingVolumes {
    /// Adds a volume. One that is not pending is removed by the next reading.
    pub(super) fn add(&self, id: &VolumeId) {
        let mut candidates = self.lock();
        candidates.additions += 1;
        let number = candidates.additions;
        candidates.ids.insert(id.clone(), number);
    }

    /// Returns the pending volumes and their annotations. `all` lists all volumes, and `read` returns the annotations of a volume if it
    /// is pending. Volumes can be added in the meantime.
    pub(super) fn read(
        &self,
        all: impl FnOnce() -> Result<Vec<VolumeId>>,
        read: impl Fn(&VolumeId) -> Result<Option<Annotations>>,
    ) -> Result<Vec<(VolumeId, Annotations)>> {
        let (before, reads_all) = {
            let candidates = self.lock();
            (candidates.ids.clone(), candidates.all_read.is_none_or(|at| at.elapsed() >= INTERVAL))
        };
        let began = Instant::now();
        let mut ids: BTreeSet<VolumeId> = before.keys().cloned().collect();
        if reads_all {
            ids.extend(all()?);
        }
        let (mut pending, mut unread, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for id in ids {
            match read(&id) {
                Ok(Some(annotations)) => pending.push((id, annotations)),
                Err(error) if error.kind() != ErrorKind::NotFound => unread.push(id),
                Ok(None) | Err(_) => others.push(id),
            }
        }
        let mut candidates = self.lock();
        for id in others {
            // Unless it was created again since.
            if candidates.ids.get(&id) == before.get(&id) {
                candidates.ids.remove(&id);
            }
        }
        for id in pending.iter().map(|(id, _)| id).chain(&unread) {
            candidates.ids.entry(id.clone()).or_default();
        }
        if reads_all {
            candidates.all_read = Some(began);
        }
        Ok(pending)
    }

    fn lock(&self) -> MutexGuard<'_, Candidates> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::error::Error;

    fn id(text: &str) -> VolumeId {
        VolumeId::parse(text).unwrap()
    }

    fn pending(_: &VolumeId) -> Result<Option<Annotations>> {
        Ok(Some(Annotations::default()))
    }

    fn names(pending: Vec<(VolumeId, Annotations)>) -> Vec<String> {
        pending.into_iter().map(|(id, _)| id.to_string()).collect()
    }

    #[test]
    fn all_volumes_are_read_once() {
        let volumes = PendingVolumes::default();
        let lists = Cell::new(0);
        let all = || {
            lists.set(lists.get() + 1);
            Ok(vec![id("a"), id("b")])
        };
        let first = |id: &VolumeId| if id.as_str() == "a" { pending(id) } else { Ok(None) };
        assert_eq!(names(volumes.read(all, first).unwrap()), ["a"]);
        volumes.add(&id("c"));
        assert_eq!(names(volumes.read(all, pending).unwrap()), ["a", "c"]);
        assert_eq!(lists.get(), 1);
    }

    #[test]
    fn a_volume_recreated_during_reading_stays() {
        let volumes = PendingVolumes::default();
        volumes.add(&id("a"));
        let deleted = |id: &VolumeId| {
            volumes.add(id);
            Err(Error::new(ErrorKind::NotFound, "open", id, "there is none"))
        };
        assert_eq!(names(volumes.read(|| Ok(Vec::new()), deleted).unwrap()), Vec::<String>::new());
        assert_eq!(names(volumes.read(|| unreachable!(), pending).unwrap()), ["a"]);
    }

    /// One volume was added, and the list has the other one.
    #[test]
    fn an_unreadable_volume_is_read_again() {
        let volumes = PendingVolumes::default();
        volumes.add(&id("a"));
        let unreadable = |id: &VolumeId| Err(Error::new(ErrorKind::Other, "read", id, "an I/O error"));
        assert_eq!(names(volumes.read(|| Ok(vec![id("b")]), unreadable).unwrap()), Vec::<String>::new());
        assert_eq!(names(volumes.read(|| unreachable!(), pending).unwrap()), ["a", "b"]);
    }

    #[test]
    fn a_failed_list_is_tried_again() {
        let volumes = PendingVolumes::default();
        let failed = || Err(Error::new(ErrorKind::Other, "list", "volumes", "an I/O error"));
        volumes.read(failed, pending).unwrap_err();
        assert_eq!(names(volumes.read(|| Ok(vec![id("a")]), pending).unwrap()), ["a"]);
    }
}
