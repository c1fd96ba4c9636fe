//! Advisory locks of whole files (flock(2)), acquired with a timeout.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
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
    lock(file.into(), FlockArg::LockExclusiveNonblock, Deadline::after(timeout), timeout, operation)
}

/// The threads that want the lock of one file by the same object. Only one of them at a time tries the lock, so that the others need not
/// try it again and again. They have no order: a thread that comes may overtake one that waits. While the lock goes from one thread to
/// the next, it is free for a moment in which another process can take it.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    is_taken: Mutex<bool>,
    freed: Condvar,
}

/// The lock of a file, held until this is dropped. Then another thread of the [`Queue`] can take it.
#[derive(Debug)]
pub(crate) struct QueuedLock<'a> {
    // Dropped before the place.
    file: Flock<OwnedFd>,
    _place: Place<'a>,
}

/// The right to try the lock, which one thread of a [`Queue`] has.
#[derive(Debug)]
struct Place<'a>(&'a Queue);

impl Queue {
    /// Locks `file` as [`exclusive`] does, but waits for the other threads of the queue first.
    ///
    /// # Errors
    /// As [`exclusive`].
    pub(crate) fn exclusive(
        &self,
        file: impl Into<OwnedFd>,
        timeout: Duration,
        operation: &'static str,
    ) -> Result<QueuedLock<'_>> {
        let (file, deadline) = (file.into(), Deadline::after(timeout));
        let Some(place) = self.place(deadline) else {
            return Err(still_locked(file.as_fd(), timeout, operation));
        };
        let file = lock(file, FlockArg::LockExclusiveNonblock, deadline, timeout, operation)?;
        Ok(QueuedLock { file, _place: place })
    }

    /// Returns `None` if another thread still has the place at the deadline.
    fn place(&self, deadline: Deadline) -> Option<Place<'_>> {
        let mut is_taken = self.is_taken();
        while *is_taken {
            let left = deadline.left();
            if left.is_zero() {
                return None;
            }
            (is_taken, _) = self.freed.wait_timeout(is_taken, left).unwrap_or_else(PoisonError::into_inner);
        }
        *is_taken = true;
        Some(Place(self))
    }

    fn is_taken(&self) -> MutexGuard<'_, bool> {
        self.is_taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.is_taken() = false;
        self.0.freed.notify_one();
    }
}

impl Deref for QueuedLock<'_> {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.file
    }
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
    exclusive(reopened(file, operation)?, timeout, operation)
}

/// Opens the file of a descriptor again, for reading only.
///
/// # Errors
/// Those of open(2).
pub(crate) fn reopened(file: BorrowedFd<'_>, operation: &'static str) -> Result<OwnedFd> {
    reopen(file, OFlag::O_RDONLY).map_err(|errno| Error::sys(operation, path_of(file), errno))
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
    lock(file.into(), FlockArg::LockSharedNonblock, Deadline::after(timeout), timeout, operation)
}

/// Tries `request`, which does not block, until it succeeds or the deadline, which is that of `timeout`, has passed.
fn lock(
    file: OwnedFd,
    request: FlockArg,
    deadline: Deadline,
    timeout: Duration,
    operation: &'static str,
) -> Result<Flock<OwnedFd>> {
    match retry(deadline, file, |file| Flock::lock(file, request)) {
        Ok(locked) => Ok(locked),
        Err((file, Errno::EAGAIN)) => Err(still_locked(file.as_fd(), timeout, operation)),
        Err((file, errno)) => Err(Error::sys(operation, path_of(file.as_fd()), errno)),
    }
}

/// Calls `attempt` with `file` until it returns something other than EAGAIN or EINTR. Returns EAGAIN after the deadline.
///
/// The kernel has no event to wait for with a timeout. flock(2) has no timeout. If a process dies, inotify(7) reports the
/// close of its file before the kernel has dropped its lock. This function therefore tries the lock at intervals that
/// double from 50 µs to 10 ms.
pub(crate) fn retry<F, T>(
    deadline: Deadline,
    mut file: F,
    mut attempt: impl FnMut(F) -> std::result::Result<T, (F, Errno)>,
) -> std::result::Result<T, (F, Errno)> {
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
    use std::sync::atomic::{AtomicUsize, Ordering};

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

    /// While a thread has the lock, other processes are excluded too.
    #[test]
    fn one_thread_of_a_queue_has_the_lock() {
        const THREADS: usize = 8;
        let (file, queue) = (tempfile::NamedTempFile::new().unwrap(), Queue::default());
        let holders = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let held = queue.exclusive(open(&file), Duration::MAX, OPERATION).unwrap();
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                        exclusive(open(&file), Duration::ZERO, OPERATION).unwrap_err();
                        holders.fetch_sub(1, Ordering::SeqCst);
                        drop(held);
                    }
                });
            }
        });
        exclusive(open(&file), Duration::ZERO, OPERATION).unwrap();
    }

    #[test]
    fn a_wait_in_the_queue_ends_at_its_timeout() {
        let (file, queue) = (tempfile::NamedTempFile::new().unwrap(), Queue::default());
        let held = queue.exclusive(open(&file), Duration::ZERO, OPERATION).unwrap();
        let error = queue.exclusive(open(&file), Duration::from_millis(20), OPERATION).unwrap_err();
        assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("20ms"), "{error}");
        drop(held);
        let other = exclusive(open(&file), Duration::ZERO, OPERATION).unwrap();
        let error = queue.exclusive(open(&file), Duration::from_millis(20), OPERATION).unwrap_err();
        assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("20ms"), "{error}");
        // The thread that failed has given up its place.
        drop(other);
        queue.exclusive(open(&file), Duration::ZERO, OPERATION).unwrap();
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
