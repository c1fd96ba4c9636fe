//! Allocating project ids: which ids are free, and when an id is free again.
//!
//! `docs/decisions/0006-project-ids.md` gives the reasons.

use std::collections::{BTreeSet, HashSet};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::fstat;

use super::limits::{self, Limits, ProjectId, StoredLimits, Usage};
use super::quota::{Interface, ProjectQuota, assign_project, explain, set_project};
use super::search::{self, Ids};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::flock::{self, Queue, QueuedLock};
use crate::sys::{self, fsxattr, random};

/// An allocator of project ids: it allocates the ids of one range on one file system.
///
/// The quota records are the only state. The allocator reserves an id by setting its limits, before a directory is assigned to
/// it. From then on every other program that looks for a free id sees that it is used, and no directory is ever in a project
/// without a limit. An id is free again when it has neither usage nor limits. After a crash, [`recover`](Self::recover)
/// finds unassigned ids from the file system alone.
///
/// A released id that files are still charged to is draining. It keeps its limits until its last file is freed.
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
    queue: Queue,
    /// The id after the one that was allocated last, 0 before the first. It is only tried first, so no lock guards it.
    next: AtomicU32,
    /// Ids to try before that one, whose records are in blocks that exist.
    reusable: Mutex<Vec<u32>>,
    /// Ids that were released while inodes were still charged to them.
    draining: Mutex<BTreeSet<ProjectId>>,
}

/// The result of releasing an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Release {
    /// The id is free and can be allocated again.
    Freed,
    /// Inodes are still charged to the id: a deleted file that is open, or a file that was moved elsewhere. The id keeps its
    /// limits, so it is not allocated, and [`ProjectIds::retry_draining`] tries again.
    Draining(Usage),
}

/// Ids that no directory is assigned to, after an attempt to free them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reclaimed {
    /// Free again.
    pub freed: Vec<ProjectId>,
    /// Still used, because inodes are charged to them.
    pub draining: Vec<Usage>,
}

impl ProjectIds {
    /// Creates an allocator for the ids of `range` on the file system of `fs`. It allocates one id at a time, under flock(2) of
    /// `lock`.
    ///
    /// The allocator opens the root of the mount that `fs` is in. `fs` can therefore be a directory whose id the allocator is to
    /// release later: an open directory keeps its id in use. The lock file must never be renamed or replaced: a waiting process
    /// would get a lock on a file that other processes do not see. Each call opens the file through `/proc/self/fd`, because
    /// duplicated descriptors share one lock.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: the range is empty. Those of dup(2) and open(2).
    #[doc(alias = "flock")]
    pub fn new(fs: impl AsFd, lock: impl AsFd, range: RangeInclusive<ProjectId>) -> Result<Self> {
        let (fs, lock) = (fs.as_fd(), lock.as_fd());
        if range.is_empty() {
            let shown = format!("{} to {}", range.start(), range.end());
            return Err(Error::new(ErrorKind::InvalidInput, "use the project ids", shown, "there are none"));
        }
        Ok(Self {
            fs: mount_root(fs)
                .map_or_else(|_| fs.try_clone_to_owned(), Ok)
                .context("duplicate", "a descriptor of the file system")?,
            range,
            lock: lock.try_clone_to_owned().context("duplicate", "a descriptor of the lock file")?,
            lock_timeout: flock::DEFAULT_TIMEOUT,
            queue: Queue::default(),
            next: AtomicU32::new(0),
            reusable: Mutex::default(),
            draining: Mutex::default(),
        })
    }

    /// Sets how long a call waits for the lock file, 60 seconds unless set. After that it fails with
    /// [`ErrorKind::Busy`].
    #[must_use]
    pub fn with_lock_timeout(mut self, lock_timeout: Duration) -> Self {
        self.lock_timeout = lock_timeout;
        self
    }

    /// Returns the range of ids that this allocator uses.
    #[must_use]
    pub fn range(&self) -> &RangeInclusive<ProjectId> {
        &self.range
    }

    /// Reserves a free id by setting its limits, and returns it. To find one takes about two system calls, however many ids are
    /// used, until the range is nearly full.
    ///
    /// Until a directory is assigned to the id, only its limits reserve it: a concurrent [`release`](Self::release) of the same
    /// id, or [`recover`](Self::recover), frees it. [`create`](Self::create) has no such gap. The reservation is durable
    /// after fsync(2) of a directory that is assigned to the id.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: all ids of the range are used. [`ErrorKind::InvalidInput`]: `limits` contain no limit, or
    /// [`ProjectQuota::set_limits`] refuses them.
    pub fn reserve(&self, limits: Limits) -> Result<ProjectId> {
        let _lock = self.lock()?;
        self.reserve_locked(limits)
    }

    /// Reserves a free id, assigns an empty directory to it, and checks that the directory is charged to it. After an error
    /// none of that remains.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve) and [`assign_project`]. [`ErrorKind::AlreadyExists`]: the directory is
    /// already in a project. [`ErrorKind::NotHonoured`]: the directory is on another file system.
    pub fn create(&self, directory: impl AsFd, limits: Limits) -> Result<ProjectId> {
        self.create_by(directory.as_fd(), limits, |directory, id| assign_project(directory, id))
    }

    /// As [`create`](Self::create), for a directory with content, which stays outside the project.
    pub(crate) fn create_filled(&self, directory: BorrowedFd<'_>, limits: Limits) -> Result<ProjectId> {
        self.create_by(directory, limits, set_project)
    }

    fn create_by(
        &self,
        directory: BorrowedFd<'_>,
        limits: Limits,
        assign: impl FnOnce(BorrowedFd<'_>, ProjectId) -> Result<()>,
    ) -> Result<ProjectId> {
        const OPERATION: &str = "make a project of";
        const OBJECT: &str = "a directory";
        // Held until the directory is assigned, so a concurrent release finds the id either without limits or charged.
        let lock = self.lock()?;
        let before = explain(fsxattr::get(directory), Interface::Attributes, OPERATION, OBJECT)?;
        if before.fsx_projid != 0 {
            let cause = format!("it is in project {}", before.fsx_projid);
            return Err(
                Error::new(ErrorKind::AlreadyExists, OPERATION, OBJECT, cause).with_remedy("limit that one")
            );
        }
        let id = self.reserve_locked(limits)?;
        let made = assign(directory, id).and_then(|()| self.verify(id, limits));
        drop(lock);
        if let Err(error) = made {
            // If this fails, recovery finds the id. The first error is the more useful one.
            fsxattr::set(directory, &before).ok();
            self.release(id).ok();
            return Err(error);
        }
        Ok(id)
    }

    /// Releases an id that no directory uses any more: waits for deferred inode inactivation of XFS, and frees the id if nothing
    /// is charged to it then. The call can be repeated.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: the id is not in the range. As
    /// [`finish_inactivation`](ProjectQuota::finish_inactivation). After an error it is draining.
    pub fn release(&self, id: ProjectId) -> Result<Release> {
        let finished = self.require_own(id).and_then(|()| self.quota().finish_inactivation(id));
        self.release_finished(id, finished, |_| ())
    }

    /// As [`release`](Self::release), for a caller that has already waited for deferred inode inactivation, with the result
    /// `finished`. That wait can be long, because it includes the deletions of all users, so callers should take contended
    /// locks only after it.
    ///
    /// Calls `cleared` with the usage and limits of the id if this call removed the limits, and not if another process did. So of
    /// all processes that release an id, exactly one gets its limits.
    pub(crate) fn release_finished(
        &self,
        id: ProjectId,
        finished: Result<()>,
        cleared: impl FnOnce(&Usage),
    ) -> Result<Release> {
        self.require_own(id)?;
        let released = finished.and_then(|()| self.free_if_drained(id, cleared));
        if matches!(released, Ok(Release::Freed)) {
            self.lock_draining().remove(&id);
            self.reuse([id.get()]);
        } else {
            self.defer_release(id);
        }
        released
    }

    /// Adds an id of the range to those that [`retry_draining`](Self::retry_draining) tries to free.
    pub(crate) fn defer_release(&self, id: ProjectId) {
        if self.range.contains(&id) {
            self.lock_draining().insert(id);
        }
    }

    fn require_own(&self, id: ProjectId) -> Result<()> {
        if self.range.contains(&id) {
            return Ok(());
        }
        let detail = format!("only ids from {} to {} are", self.range.start(), self.range.end());
        Err(Error::new(ErrorKind::InvalidInput, "release project", id, detail))
    }

    /// Tries again to free the ids that were draining when this `ProjectIds` released or recovered them. Ids in `assigned` are
    /// dropped from the list: another process has freed and allocated them again.
    ///
    /// # Errors
    /// The first error; the call tries the other ids nevertheless. [`draining`](Self::draining) returns the ids that are left.
    pub fn retry_draining(&self, assigned: &HashSet<ProjectId>) -> Result<Reclaimed> {
        self.release_all(&self.still_draining(assigned))
    }

    /// As [`retry_draining`](Self::retry_draining), for a caller that has already waited, as for
    /// [`release_finished`](Self::release_finished).
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
        draining.iter().copied().collect()
    }

    /// Returns the ids that are draining.
    #[must_use]
    pub fn draining(&self) -> Vec<ProjectId> {
        self.lock_draining().iter().copied().collect()
    }

    /// Frees the ids of the range that have limits and are not in `assigned`. Such ids remain when a crash interrupts a
    /// reservation or a release. An id that inodes are charged to stays in use. The cost is proportional to the number of used ids,
    /// so call it once, at start.
    ///
    /// # Errors
    /// The first error; the call tries the other ids nevertheless.
    pub fn recover(&self, assigned: &HashSet<ProjectId>) -> Result<Reclaimed> {
        self.recover_from(&self.reserved()?, assigned)
    }

    /// Returns the ids of the range that have limits. An id without limits was never reserved: the owner of a file can give it
    /// any id, and so make any number of ids used.
    pub(crate) fn reserved(&self) -> Result<Vec<ProjectId>> {
        Ok(self.reserved_usages()?.iter().map(|usage| usage.id).collect())
    }

    fn reserved_usages(&self) -> Result<Vec<Usage>> {
        let mut reserved = Vec::new();
        for usage in self.quota().ids(self.range.clone()) {
            reserved.extend(Some(usage?).filter(|usage| usage.limits != StoredLimits::UNLIMITED));
        }
        Ok(reserved)
    }

    /// As [`recover`](Self::recover), for a caller that has read the [`reserved`](Self::reserved) ids before it locked what keeps
    /// other processes from reserving more.
    pub(crate) fn recover_from(
        &self,
        reserved: &[ProjectId],
        assigned: &HashSet<ProjectId>,
    ) -> Result<Reclaimed> {
        self.reuse(search::beside(reserved.iter().map(|id| id.get()), RECORDS_IN_BLOCK));
        let orphans: Vec<_> = reserved.iter().copied().filter(|id| !assigned.contains(id)).collect();
        // The orphans include the draining ids.
        self.lock_draining().clear();
        self.release_all(&orphans)
    }

    /// Frees the ids of the range that have limits and nothing is charged to. Unlike [`recover`](Self::recover), it does not wait
    /// for deferred inode inactivation, and its caller needs no list of directories. It must not be used for a range in which
    /// ids are reserved before directories are assigned to them.
    pub(crate) fn free_abandoned(&self) -> Result<()> {
        let reserved = self.reserved_usages()?;
        for usage in reserved.iter().filter(|usage| usage.is_empty()) {
            if self.free_if_drained(usage.id, |_| ())? == Release::Freed {
                self.reuse([usage.id.get()]);
            }
        }
        self.reuse(search::beside(reserved.iter().map(|usage| usage.id.get()), RECORDS_IN_BLOCK));
        Ok(())
    }

    /// Adds ids to try first. They may be used by another process by then.
    fn reuse(&self, ids: impl IntoIterator<Item = u32>) {
        let mut reusable = self.lock_reusable();
        let more = MOST_REUSABLE.saturating_sub(reusable.len());
        reusable.extend(ids.into_iter().take(more));
    }

    /// As [`release`](Self::release) of each id, but waits once for the frees of all: an id whose inodes are freed has no
    /// post-EOF blocks either.
    fn release_all(&self, ids: &[ProjectId]) -> Result<Reclaimed> {
        let Some(first) = ids.first() else { return Ok(Reclaimed::default()) };
        if let Err(error) = self.quota().finish_inactivation(*first) {
            self.lock_draining().extend(ids);
            return Err(error);
        }
        self.reclaim(ids, |id| self.release_finished(id, Ok(()), |_| ()))
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
        limits.require_limit(OPERATION, OBJECT)?;
        let (first, last) = (self.range.start().get(), self.range.end().get());
        let next = Some(self.next.load(Ordering::Relaxed)).filter(|next| *next != 0);
        let reusable = std::iter::from_fn(|| self.lock_reusable().pop());
        let mut kernel = Kernel { quota: self.quota(), last };
        let found = search::free_id(&mut kernel, &(first..=last), reusable.chain(next))?;
        let Some(id) = found.and_then(ProjectId::new) else {
            let detail = format!("all ids from {first} to {last} are in use");
            return Err(Error::new(ErrorKind::NoSpace, OPERATION, OBJECT, detail));
        };
        match self.quota().set_limits(id, limits) {
            Ok(_) => {
                if self.lock_reusable().is_empty() {
                    self.next.store(id.get() + 1, Ordering::Relaxed);
                }
                Ok(id)
            }
            Err(error) => {
                // Most errors set no limit, and then this fails too. Otherwise recovery finds the id.
                self.quota().clear_limits(id).ok();
                Err(error)
            }
        }
    }

    fn verify(&self, id: ProjectId, requested: Limits) -> Result<()> {
        let usage = self.quota().usage(id)?;
        if usage.is_some_and(|usage| usage.inodes.0 > 0 && limits::honoured(requested, &usage.limits)) {
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

    /// Locks the lock file for one allocation or release.
    fn lock(&self) -> Result<QueuedLock<'_>> {
        let operation = "allocate or free a project id, which takes the lock";
        let own = flock::reopened(self.lock.as_fd(), operation)?;
        self.queue.exclusive(own, self.lock_timeout, operation)
    }

    fn lock_reusable(&self) -> MutexGuard<'_, Vec<u32>> {
        self.reusable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_draining(&self) -> MutexGuard<'_, BTreeSet<ProjectId>> {
        self.draining.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens the root of the mount that a directory is in, or the root directory of this process if that is below.
fn mount_root(directory: BorrowedFd<'_>) -> sys::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_NO_XDEV);
    let identity = |directory: &OwnedFd| fstat(directory).map(|status| (status.st_dev, status.st_ino));
    let mut here = openat2(directory, c".", how)?;
    loop {
        match openat2(&here, c"..", how) {
            Ok(parent) if identity(&parent)? != identity(&here)? => here = parent,
            Ok(_) | Err(Errno::EXDEV) => return Ok(here),
            Err(errno) => return Err(errno),
        }
    }
}

/// XFS stores this many quota records in a block of 4096 bytes. It never frees such a block.
const RECORDS_IN_BLOCK: u32 = 30;
/// The most ids to remember for reuse.
const MOST_REUSABLE: usize = 4096;

/// The quota records of the file system.
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
