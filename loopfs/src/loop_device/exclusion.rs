//! Mutual exclusion of calls for the same file.
//!
//! Processes exclude each other by flock(2) on the caller's descriptor. That lock belongs to the open file description, so threads
//! that share one exclude each other by a set of files in this process. The descriptor that a device keeps cannot hold the lock:
//! after a crash the device would hold it for as long as it is bound.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::fstat;

use super::binding::BackingFile;
use crate::deadline::Deadline;
use crate::descriptor::reopen;
use crate::error::{Context, Result};
use crate::flock;
use crate::sys::file_lock;
use crate::units::{Bytes, DeviceNumber};

/// For errors.
const OPERATION: &str = "attach or detach the file, which locks it";

/// The exclusive right to attach and detach one file, held until this is dropped. Two processes must not use descriptors of one
/// open file description for that concurrently.
pub(super) struct Exclusion<'a> {
    image: BorrowedFd<'a>,
    /// An open file description of its own, if the caller's cannot be locked.
    own: Option<OwnedFd>,
    entry: Entry,
    size: Bytes,
}

impl<'a> Exclusion<'a> {
    /// Waits until no other call works on the file, for up to `timeout`.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy): another call still has the file. Those of fstat(2) and flock(2).
    pub(super) fn lock(image: BorrowedFd<'a>, timeout: Duration) -> Result<Self> {
        let deadline = Deadline::after(timeout);
        let status = fstat(image).context("fstat", "the backing file")?;
        let backing = BackingFile { device: DeviceNumber::from_raw(status.st_dev), inode: status.st_ino };
        let still_locked = || flock::still_locked(image, timeout, OPERATION);
        let entry = Entry::insert(backing, deadline).ok_or_else(still_locked)?;
        let own = match lock_until(deadline, image) {
            Ok(()) => None,
            // A descriptor that was opened with O_PATH.
            Err(Errno::EBADF) => {
                let own = reopen(image, OFlag::O_RDONLY).context("open", "the backing file")?;
                match lock_until(deadline, own.as_fd()) {
                    Err(Errno::EAGAIN) => return Err(still_locked()),
                    locked => locked.context("lock", "the backing file")?,
                }
                Some(own)
            }
            Err(Errno::EAGAIN) => return Err(still_locked()),
            Err(errno) => return Err(errno).context("lock", "the backing file"),
        };
        Ok(Self { image, own, entry, size: Bytes(status.st_size as u64) })
    }

    /// Returns the file.
    pub(super) fn backing(&self) -> BackingFile {
        self.entry.0
    }

    /// Returns the size of the file when it was locked.
    pub(super) fn size(&self) -> Bytes {
        self.size
    }
}

impl Drop for Exclusion<'_> {
    fn drop(&mut self) {
        let locked = self.own.as_ref().map_or(self.image, AsFd::as_fd);
        // The descriptor was locked, so it can be unlocked; its last close would do it too.
        file_lock::unlock_whole(locked).ok();
    }
}

/// EAGAIN: another open file description has the lock at the deadline.
fn lock_until(deadline: Deadline, file: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    flock::retry(deadline.left(), file, |file| file_lock::try_lock_whole(file).map_err(|errno| (file, errno)))
        .map_err(|(_, errno)| errno)
}

/// A file that a call of this process has locked.
struct Entry(BackingFile);

#[derive(Default)]
struct Entries {
    files: HashSet<BackingFile>,
    /// Threads that wait for a file. Waking none would be a system call all the same.
    waiting: usize,
}

static ENTRIES: LazyLock<Mutex<Entries>> = LazyLock::new(Mutex::default);
static REMOVED: Condvar = Condvar::new();

impl Entry {
    /// Waits until no other thread has the file. Returns `None` if one still has it at the deadline.
    fn insert(backing: BackingFile, deadline: Deadline) -> Option<Self> {
        let mut entries = entries();
        while !entries.files.insert(backing) {
            let left = deadline.left();
            if left.is_zero() {
                return None;
            }
            entries.waiting += 1;
            (entries, _) = REMOVED.wait_timeout(entries, left).unwrap_or_else(PoisonError::into_inner);
            entries.waiting -= 1;
        }
        Some(Self(backing))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut entries = entries();
        entries.files.remove(&self.0);
        if entries.waiting > 0 {
            REMOVED.notify_all();
        }
    }
}

fn entries() -> MutexGuard<'static, Entries> {
    // A panic leaves the set consistent.
    ENTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}
