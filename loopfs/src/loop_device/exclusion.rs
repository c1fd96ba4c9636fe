//! Mutual exclusion of calls for the same file.
//!
//! Processes exclude each other by flock(2). That lock belongs to an open file description. Each call opens its own, because the
//! caller may have locked the file, and have a lease on it, through the given descriptor. Threads exclude each other by a set of files in this
//! process. The descriptor that a device keeps cannot hold the lock: after a crash the device would hold it for as long as it is
//! bound.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::LazyLock;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{FileStat, fstat};

use super::binding::BackingFile;
use crate::deadline::Deadline;
use crate::descriptor::reopen;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::flock;
use crate::keyed_lock::{KeyedLock, KeyedLocks};
use crate::sys::file_lock;
use crate::units::DeviceNumber;

/// The files that calls of this process work on.
static LOCKED_FILES: LazyLock<KeyedLocks<BackingFile>> = LazyLock::new(KeyedLocks::default);

/// For errors.
const OPERATION: &str = "attach or detach the file, which locks it";

/// The exclusive right to attach and detach one file, held until this is dropped.
pub(super) struct Exclusion {
    /// Open for reading only, and locked unless the caller's descriptor has the file locked.
    own: OwnedFd,
    file: KeyedLock<'static, BackingFile>,
    status: FileStat,
    deadline: Deadline,
}

impl Exclusion {
    /// Waits until no other call works on the file, for up to `timeout`. The caller's own exclusive lock through `image` (flock(2)) has
    /// the same effect, and stays.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy): another call still has the file. Those of fstat(2), open(2) and flock(2).
    pub(super) fn lock(image: BorrowedFd<'_>, timeout: Duration) -> Result<Self> {
        let deadline = Deadline::after(timeout);
        let status = fstat(image).context("fstat", "the backing file")?;
        let backing = BackingFile { device: DeviceNumber::from_raw(status.st_dev), inode: status.st_ino };
        let still_locked = || flock::still_locked(image, timeout, OPERATION);
        let file = LOCKED_FILES.lock_until(backing, deadline).ok_or_else(still_locked)?;
        // O_NONBLOCK: opening a FIFO would wait for a writer.
        let own = reopen(image, OFlag::O_RDONLY | OFlag::O_NONBLOCK).context("open", "the backing file")?;
        let locked = match file_lock::try_lock_whole(&own) {
            Err(Errno::EAGAIN) => match caller_lock(image) {
                CallerLock::Exclusive => Ok(()),
                CallerLock::Shared => {
                    let cause = "the given descriptor has a shared lock of it (flock(2))";
                    return Err(Error::new(ErrorKind::Busy, OPERATION, "the backing file", cause)
                        .with_remedy("take an exclusive one, or none"));
                }
                CallerLock::None => lock_until(deadline, own.as_fd()),
            },
            locked => locked,
        };
        match locked {
            Ok(()) => {
                // The previous holder of the lock may have changed the size.
                let status = fstat(&own).context("fstat", "the backing file")?;
                Ok(Self { own, file, status, deadline })
            }
            Err(Errno::EAGAIN) => Err(still_locked().with_remedy(
                "`lslocks` on the node lists the processes that hold it: end one that hangs, or pass the descriptor of \
                 this process that holds it; otherwise try again",
            )),
            Err(errno) => Err(errno).context("lock", "the backing file"),
        }
    }

    /// Returns the file.
    pub(super) fn backing(&self) -> BackingFile {
        self.file.key
    }

    /// Returns the status of the file when it was locked.
    pub(super) fn status(&self) -> &FileStat {
        &self.status
    }

    /// Returns the end of the time limit of the call.
    pub(super) fn deadline(&self) -> Deadline {
        self.deadline
    }
}

impl AsFd for Exclusion {
    /// Returns a descriptor for reading only, whose open file description belongs to this call.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }
}

impl Drop for Exclusion {
    fn drop(&mut self) {
        // A child process may have a copy of the descriptor until it calls execve(2), so closing it does not suffice.
        file_lock::unlock_whole(&self.own).ok();
    }
}

/// The lock (flock(2)) of an open file description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallerLock {
    None,
    Shared,
    Exclusive,
}

/// Returns the lock that a descriptor has. No system call tells, so this reads `/proc/self/fdinfo`.
fn caller_lock(file: BorrowedFd<'_>) -> CallerLock {
    let descriptor = file.as_raw_fd();
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).unwrap_or_default();
    match text.lines().find_map(|line| line.strip_prefix("lock:")?.split_once(" FLOCK ")) {
        None => CallerLock::None,
        Some((_, lock)) if lock.contains(" WRITE ") => CallerLock::Exclusive,
        Some(_) => CallerLock::Shared,
    }
}

/// EAGAIN: another open file description has the lock at the deadline.
fn lock_until(deadline: Deadline, file: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    flock::retry(deadline, file, |file| file_lock::try_lock_whole(file).map_err(|errno| (file, errno)))
        .map_err(|(_, errno)| errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_lock_returns_the_held_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let other = file.reopen().unwrap();
        assert_eq!(caller_lock(file.as_file().as_fd()), CallerLock::None);
        file.as_file().lock_shared().unwrap();
        assert_eq!(caller_lock(file.as_file().as_fd()), CallerLock::Shared);
        file.as_file().unlock().unwrap();
        file.as_file().lock().unwrap();
        assert_eq!(caller_lock(file.as_file().as_fd()), CallerLock::Exclusive);
        assert_eq!(caller_lock(other.as_fd()), CallerLock::None);
    }
}
