//! Giving out project ids: which are free, and when one is free again.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::fcntl::Flock;

use super::errors::{Interface, explain};
use super::limits::{self, Limits, Usage};
use super::project_id::ProjectId;
use super::quota::{ProjectQuota, assign_project};
use super::search::{self, Ids};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::flock;
use crate::sys::{fsxattr, random};

/// Gives out the project ids of a range of its own on one file system.
///
/// The quota records are the only state: an id is taken by giving it limits, before any directory carries it,
/// so every other program that looks for a free id sees it from then on, and no directory is ever tagged
/// without a limit. It is free again when it has neither usage nor limits. What a crash leaves is found by
/// [`recover`](Self::recover) from the file system alone.
///
/// Any number of processes may use one range, each with a `ProjectIds` on the same lock file.
///
/// # Errors
/// All functions: those of [`ProjectQuota`], and those of flock(2) on the lock file.
#[derive(Debug)]
pub struct ProjectIds {
    fs: OwnedFd,
    range: RangeInclusive<ProjectId>,
    lock: OwnedFd,
    lock_timeout: Duration,
    /// The id after the one that was allocated last, 0 before the first. It is only tried first, so no lock guards it.
    next: AtomicU32,
    /// Ids that were given up while something was still charged to them.
    draining: Mutex<Vec<ProjectId>>,
}

/// What became of an id that was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Release {
    /// It can be given out again.
    Freed,
    /// Something is still charged to it: a deleted file that is open, or one that was moved elsewhere. It
    /// keeps its limits, so nobody takes it, and is tried again by [`ProjectIds::retry_draining`].
    Draining(Usage),
}

/// Ids that nobody carries, and what became of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Free again.
    pub freed: Vec<ProjectId>,
    /// Left as they are, for something is charged to them.
    pub draining: Vec<Usage>,
}

impl ProjectIds {
    /// Ids of `range` on the file system of `fs`, given out one at a time under flock(2) of `lock`.
    ///
    /// `fs` must not be `O_PATH`, or nothing can be released. The lock file must never be renamed or
    /// replaced: who waits for it would wake up with a lock on a file that others do not see. Each call opens it
    /// through `/proc/self/fd`, because duplicated descriptors share one lock.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: the range is empty. Those of dup(2) and open(2).
    #[doc(alias = "flock")]
    pub fn new(fs: BorrowedFd<'_>, lock: BorrowedFd<'_>, range: RangeInclusive<ProjectId>) -> Result<Self> {
        if range.is_empty() {
            let shown = format!("{} to {}", range.start(), range.end());
            return Err(Error::new(ErrorKind::InvalidInput, "use the project ids", shown, "there are none"));
        }
        Ok(Self {
            fs: fs.try_clone_to_owned().context("duplicate", "a descriptor of the file system")?,
            range,
            lock: lock.try_clone_to_owned().context("duplicate", "a descriptor of the lock file")?,
            lock_timeout: flock::DEFAULT_TIMEOUT,
            next: AtomicU32::new(0),
            draining: Mutex::new(Vec::new()),
        })
    }

    /// Sets how long a call waits for the lock file, 60 seconds unless set. After that it fails with
    /// [`ErrorKind::Busy`].
    #[must_use]
    pub fn with_lock_timeout(mut self, lock_timeout: Duration) -> Self {
        self.lock_timeout = lock_timeout;
        self
    }

    /// The ids that are given out.
    #[must_use]
    pub fn range(&self) -> &RangeInclusive<ProjectId> {
        &self.range
    }

    /// Takes a free id by limiting it. However many are in use it takes about two calls of the kernel to
    /// find one, until the range is nearly full.
    ///
    /// Until a directory carries it only its limits keep it: a concurrent [`release`](Self::release) of the
    /// same id, or [`recover`](Self::recover), frees it. [`create`](Self::create) leaves no such moment.
    /// It is durable when the directory that carries it has been made so by fsync(2).
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: all ids of the range are in use. [`ErrorKind::InvalidInput`]: `limits` limit
    /// nothing, or are refused by [`ProjectQuota::set_limits`].
    pub fn reserve(&self, limits: Limits) -> Result<ProjectId> {
        let _lock = self.lock()?;
        self.reserve_locked(limits)
    }

    /// Takes a free id by limiting it, puts an empty directory into it and checks that it is charged there:
    /// all of it or nothing.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve) and [`assign_project`]. [`ErrorKind::AlreadyExists`]: the directory is
    /// in a project. [`ErrorKind::NotHonoured`]: it is on another file system.
    pub fn create(&self, directory: impl AsFd, limits: Limits) -> Result<ProjectId> {
        const OPERATION: &str = "make a project of";
        const OBJECT: &str = "a directory";
        let directory = directory.as_fd();
        let before = explain(fsxattr::get(directory), Interface::Attributes, OPERATION, OBJECT)?;
        if before.fsx_projid != 0 {
            let detail = format!("it is in project {}; limit that one", before.fsx_projid);
            return Err(Error::new(ErrorKind::AlreadyExists, OPERATION, OBJECT, detail));
        }
        // Held until it is tagged: whoever gives up an id finds it without usage, or charged.
        let lock = self.lock()?;
        let id = self.reserve_locked(limits)?;
        let made = assign_project(directory, id).and_then(|()| self.verify(id, limits));
        drop(lock);
        if let Err(error) = made {
            // What cannot be undone now is found by recovery, and the first error says more.
            fsxattr::set(directory, &before).ok();
            self.release(id).ok();
            return Err(error);
        }
        Ok(id)
    }

    /// Gives up an id that nothing shall carry any more: waits for the frees that XFS defers, and frees it
    /// if nothing is charged to it then. Repeating it does no harm.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: the id is not of the range. As
    /// [`finish_frees`](ProjectQuota::finish_frees). After an error it is draining.
    pub fn release(&self, id: ProjectId) -> Result<Release> {
        let finished = self.require_own(id).and_then(|()| self.quota().finish_frees(id));
        self.release_finished(id, finished, |_| ())
    }

    /// [`release`](Self::release) for who has waited already: those frees may take long, whoever deleted the files, and locks that
    /// others wait for are better taken after them.
    ///
    /// Calls `cleared` with the usage and limits that the id had, if this call removed its limits. It does not call it if
    /// another process did. So of all processes that release an id, exactly one learns what the id was limited to.
    pub(crate) fn release_finished(
        &self,
        id: ProjectId,
        finished: Result<()>,
        cleared: impl FnOnce(&Usage),
    ) -> Result<Release> {
        self.require_own(id)?;
        let released = finished.and_then(|()| self.free_if_drained(id, cleared));
        let mut draining = self.lock_draining();
        draining.retain(|other| *other != id);
        if !matches!(released, Ok(Release::Freed)) {
            draining.push(id);
        }
        released
    }

    fn require_own(&self, id: ProjectId) -> Result<()> {
        if self.range.contains(&id) {
            return Ok(());
        }
        let detail = format!("only ids from {} to {} are", self.range.start(), self.range.end());
        Err(Error::new(ErrorKind::InvalidInput, "release project", id, detail))
    }

    /// Tries again to free the ids that were draining when this `ProjectIds` was asked to release or recover
    /// them. One that is in `assigned` is forgotten: another process has freed it, and given it out anew.
    ///
    /// # Errors
    /// The first one met; the other ids were tried all the same. See [`draining`](Self::draining) for those
    /// that are left.
    pub fn retry_draining(&self, assigned: &HashSet<ProjectId>) -> Result<Reclaimed> {
        self.reclaim(&self.still_draining(assigned), |id| self.release(id))
    }

    /// [`retry_draining`](Self::retry_draining) for who has waited already, as for [`release_finished`](Self::release_finished).
    pub(crate) fn retry_finished(
        &self,
        assigned: &HashSet<ProjectId>,
        mut cleared: impl FnMut(&Usage),
    ) -> Result<Reclaimed> {
        self.reclaim(&self.still_draining(assigned), |id| self.release_finished(id, Ok(()), &mut cleared))
    }

    fn still_draining(&self, assigned: &HashSet<ProjectId>) -> Vec<ProjectId> {
        let mut draining = self.lock_draining();
        draining.retain(|id| !assigned.contains(id));
        draining.clone()
    }

    /// The ids that wait to be freed.
    #[must_use]
    pub fn draining(&self) -> Vec<ProjectId> {
        self.lock_draining().clone()
    }

    /// Frees the ids of the range that are not in `assigned`: those of reservations and removals that a crash
    /// interrupted. One that something is charged to stays taken, whoever carries it. Its cost grows with
    /// the ids in use: meant for once, at start.
    ///
    /// # Errors
    /// The first one met; the other ids were tried all the same.
    pub fn recover(&self, assigned: &HashSet<ProjectId>) -> Result<Reclaimed> {
        let mut orphans = Vec::new();
        for usage in self.quota().ids(self.range.clone()) {
            orphans.extend(Some(usage?.id).filter(|id| !assigned.contains(id)));
        }
        // What drains is among the orphans.
        self.lock_draining().clear();
        self.reclaim(&orphans, |id| self.release(id))
    }

    fn reclaim(
        &self,
        ids: &[ProjectId],
        mut release: impl FnMut(ProjectId) -> Result<Release>,
    ) -> Result<Reclaimed> {
        let mut reclaimed = Reclaimed::default();
        let mut first_error = None;
        for id in ids {
            match release(*id) {
                Ok(Release::Freed) => reclaimed.freed.push(*id),
                Ok(Release::Draining(usage)) => reclaimed.draining.push(usage),
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        first_error.map_or(Ok(reclaimed), Err)
    }

    fn reserve_locked(&self, limits: Limits) -> Result<ProjectId> {
        const OPERATION: &str = "reserve";
        const OBJECT: &str = "a project id";
        if !limits.restrict() {
            let detail = "an id is taken by what it is limited to, and these limits are none";
            return Err(Error::new(ErrorKind::InvalidInput, OPERATION, OBJECT, detail));
        }
        let (first, last) = (self.range.start().get(), self.range.end().get());
        let next = Some(self.next.load(Ordering::Relaxed)).filter(|next| *next != 0);
        let found = search::free_id(&mut Kernel { quota: self.quota(), last }, &(first..=last), next)?;
        let Some(id) = found.and_then(ProjectId::new) else {
            let detail = format!("all ids from {first} to {last} are in use");
            return Err(Error::new(ErrorKind::NoSpace, OPERATION, OBJECT, detail));
        };
        match self.quota().set_limits(id, limits) {
            Ok(_) => {
                self.next.store(id.get() + 1, Ordering::Relaxed);
                Ok(id)
            }
            Err(error) => {
                // Most errors set nothing, and then this fails as well; if not, recovery finds it.
                self.quota().clear_limits(id).ok();
                Err(error)
            }
        }
    }

    fn verify(&self, id: ProjectId, asked: Limits) -> Result<()> {
        let usage = self.quota().usage(id)?;
        if usage.is_some_and(|usage| usage.inodes.0 > 0 && limits::honoured(asked, &usage.limits)) {
            return Ok(());
        }
        let detail =
            format!("it is not charged there ({usage:?}); is it on the file system that has the limits?");
        Err(Error::new(ErrorKind::NotHonoured, "put a directory into project", id, detail))
    }

    fn free_if_drained(&self, id: ProjectId, cleared: impl FnOnce(&Usage)) -> Result<Release> {
        let quota = self.quota();
        let _lock = self.lock()?;
        match quota.usage(id)? {
            None => Ok(Release::Freed),
            Some(usage) if usage.is_empty() => {
                quota.clear_limits(id)?;
                cleared(&usage);
                Ok(Release::Freed)
            }
            Some(usage) => Ok(Release::Draining(usage)),
        }
    }

    fn quota(&self) -> ProjectQuota<'_> {
        ProjectQuota::of(self.fs.as_fd())
    }

    /// The lock belongs to an open file description, so each caller opens its own: threads exclude each other as
    /// processes do.
    fn lock(&self) -> Result<Flock<OwnedFd>> {
        let operation = "allocate or free a project id, which takes the lock";
        flock::exclusive_reopened(self.lock.as_fd(), self.lock_timeout, operation)
    }

    fn lock_draining(&self) -> MutexGuard<'_, Vec<ProjectId>> {
        self.draining.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The quota records of the kernel.
struct Kernel<'fs> {
    quota: ProjectQuota<'fs>,
    last: u32,
}

impl Kernel<'_> {
    fn id(number: u32) -> Result<ProjectId> {
        let refuse = || Error::new(ErrorKind::InvalidInput, "use project", number, "it cannot have limits");
        ProjectId::new(number).ok_or_else(refuse)
    }
}

impl Ids for Kernel<'_> {
    type Error = Error;

    fn is_used(&mut self, id: u32) -> Result<bool> {
        Ok(self.quota.usage(Self::id(id)?)?.is_some())
    }

    fn next_used(&mut self, from: u32) -> Result<Option<u32>> {
        let mut used = self.quota.ids(Self::id(from)?..=Self::id(self.last)?);
        Ok(used.next().transpose()?.map(|usage| usage.id.get()))
    }

    fn random(&mut self) -> Result<u64> {
        random::number().context("choose", "a project id")
    }
}
