//! Advisory locks of whole files (flock(2)), acquired with a timeout.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};

use crate::deadline::Deadline;
use crate::descriptor::{self, reopen};
use crate::error::{Error, ErrorKind, Result};

/// The default timeout for a lock. No process holds a lock of the store while it copies or removes files. A lock that is
/// held for longer therefore belongs to a process that hangs, most likely on the disk.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Locks `file` exclusively, and waits up to `timeout` while other callers hold its lock. `operation` is the name of the
/// caller's operation in the error.
///
/// # Errors
/// [`ErrorKind::Busy`]: the lock was not free in time; the error names the file. The errors of flock(2).
pub(crate) fn exclusive(
    file: impl Into<OwnedFd>,
    timeout: Duration,
    operation: &'static str,
) -> Result<Flock<OwnedFd>> {
    lock(file.into(), FlockArg::LockExclusiveNonblock, timeout, operation)
}

/// Opens the file of a descriptor again and locks it as [`exclusive`] does. The lock belongs to the new open file
/// description, so threads that share `file` exclude each other as processes do.
///
/// # Errors
/// The errors of [`exclusive`] and of open(2).
pub(crate) fn exclusive_reopened(
    file: BorrowedFd<'_>,
    timeout: Duration,
    operation: &'static str,
) -> Result<Flock<OwnedFd>> {
    let own = reopen(file, OFlag::O_RDONLY).map_err(|errno| Error::sys(operation, path_of(file), errno))?;
    exclusive(own, timeout, operation)
}

/// Locks `file` as [`exclusive`] does, but shares the lock with other callers of this function.
///
/// # Errors
/// As [`exclusive`].
pub(crate) fn shared(
    file: impl Into<OwnedFd>,
    timeout: Duration,
    operation: &'static str,
) -> Result<Flock<OwnedFd>> {
    lock(file.into(), FlockArg::LockSharedNonblock, timeout, operation)
}

/// Tries `request`, which does not block, until it succeeds or `timeout` has passed.
fn lock(
    file: OwnedFd,
    request: FlockArg,
    timeout: Duration,
    operation: &'static str,
) -> Result<Flock<OwnedFd>> {
    match retry(timeout, file, |file| Flock::lock(file, request)) {
        Ok(locked) => Ok(locked),
        Err((file, Errno::EAGAIN)) => Err(still_locked(file.as_fd(), timeout, operation)),
        Err((file, errno)) => Err(Error::sys(operation, path_of(file.as_fd()), errno)),
    }
}

/// Calls `attempt` with `file` until it returns something other than EAGAIN or EINTR. Returns EAGAIN after `timeout`.
///
/// The kernel has no event to wait for with a timeout. flock(2) has no timeout. If a process dies, inotify(7) reports the
/// close of its file before the kernel has dropped its lock. This function therefore tries the lock at intervals that
/// double from 50 µs to 10 ms.
pub(crate) fn retry<F, T>(
    timeout: Duration,
    mut file: F,
    mut attempt: impl FnMut(F) -> std::result::Result<T, (F, Errno)>,
) -> std::result::Result<T, (F, Errno)> {
    let deadline = Deadline::after(timeout);
    let mut pause = FIRST_PAUSE;
    loop {
        file = match attempt(file) {
            Err((file, Errno::EAGAIN | Errno::EINTR)) => file,
            other => return other,
        };
        let left = deadline.left();
        if left.is_zero() {
            return Err((file, Errno::EAGAIN));
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Returns the error of a call that waited for the lock of `file` for `timeout`.
pub(crate) fn still_locked(file: BorrowedFd<'_>, timeout: Duration, operation: &'static str) -> Error {
    let cause = format!("another process or thread held the lock on this file for {timeout:?}");
    Error::new(ErrorKind::Busy, operation, path_of(file), cause).with_remedy(
        "`lslocks` on the node lists the processes that hold it: end one that hangs, otherwise try again",
    )
}

/// Returns the path of an open file, for messages.
fn path_of(file: BorrowedFd<'_>) -> String {
    match std::fs::read_link(descriptor::link(file)) {
        Ok(path) => path.display().to_string(),
        Err(_) => "a lock file".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const OPERATION: &str = "test the lock";

    fn open(file: &tempfile::NamedTempFile) -> File {
        file.reopen().unwrap()
    }

    #[test]
    fn a_timeout_names_file_and_remedy() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let held = shared(open(&file), Duration::MAX, OPERATION).unwrap();
        let error = exclusive(open(&file), Duration::from_millis(20), OPERATION).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        let path = file.path().display().to_string();
        for part in [OPERATION, path.as_str(), "20ms", "lslocks"] {
            assert!(error.to_string().contains(part), "{part} is missing in: {error}");
        }
        // Shared locks do not exclude each other, and a released lock can be acquired again.
        shared(open(&file), Duration::ZERO, OPERATION).unwrap();
        drop(held);
        exclusive(open(&file), Duration::ZERO, OPERATION).unwrap();
    }

    #[test]
    fn a_waiter_gets_a_released_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let held = exclusive(open(&file), Duration::ZERO, OPERATION).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| exclusive(open(&file), DEFAULT_TIMEOUT, OPERATION));
            drop(held);
            waiter.join().unwrap().unwrap();
        });
    }
}
