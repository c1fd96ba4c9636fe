//! Advisory locks of whole files (flock(2)), waited for with a deadline.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::error::{Error, ErrorKind, Result};

/// How long a caller waits for a lock unless it says otherwise. No lock of the store is held while files are copied or
/// removed, so one that is held for longer belongs to a process that hangs, most likely on the disk.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Locks `file` for this caller alone, and waits up to `timeout` for the callers that hold its lock. `operation` is what
/// the caller does with the lock, for its error.
///
/// # Errors
/// [`ErrorKind::Busy`]: the lock was not free in time; the error names the file. Those of flock(2).
pub(crate) fn exclusive(
    file: impl Into<OwnedFd>,
    timeout: Duration,
    operation: &'static str,
) -> Result<Flock<OwnedFd>> {
    lock(file.into(), FlockArg::LockExclusiveNonblock, timeout, operation)
}

/// Locks `file` as [`exclusive`] does, but for any number of callers that ask for shared access.
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
///
/// The kernel gives no event to wait for with a deadline: flock(2) has no timeout, and inotify(7) reports the close of a
/// process that dies before the kernel has dropped its lock. So the lock is tried at intervals that double from 50 µs to
/// 10 ms.
fn lock(
    mut file: OwnedFd,
    request: FlockArg,
    timeout: Duration,
    operation: &'static str,
) -> Result<Flock<OwnedFd>> {
    let started = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        file = match Flock::lock(file, request) {
            Ok(locked) => return Ok(locked),
            Err((file, Errno::EAGAIN | Errno::EINTR)) => file,
            Err((file, errno)) => return Err(Error::sys(operation, locked_file(&file), errno)),
        };
        let left = timeout.saturating_sub(started.elapsed());
        if left.is_zero() {
            let detail = format!(
                "another process or thread held the lock on this file for {timeout:?}; `lslocks` on the node lists the \
                 processes that hold it: end one that hangs, otherwise try again"
            );
            return Err(Error::new(ErrorKind::Busy, operation, locked_file(&file), detail));
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The path of an open file, for messages.
fn locked_file(file: &OwnedFd) -> String {
    match std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) {
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
    fn a_lock_that_stays_held_is_an_error_that_names_the_file_and_the_remedy() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let held = shared(open(&file), Duration::ZERO, OPERATION).unwrap();
        let error = exclusive(open(&file), Duration::from_millis(20), OPERATION).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        let path = file.path().display().to_string();
        for part in [OPERATION, path.as_str(), "20ms", "lslocks"] {
            assert!(error.to_string().contains(part), "{part} is missing in: {error}");
        }
        // Shared holders do not exclude each other, and a released lock can be had again.
        shared(open(&file), Duration::ZERO, OPERATION).unwrap();
        drop(held);
        exclusive(open(&file), Duration::ZERO, OPERATION).unwrap();
    }

    #[test]
    fn a_waiter_gets_the_lock_when_its_holder_releases_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let held = exclusive(open(&file), Duration::ZERO, OPERATION).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| exclusive(open(&file), DEFAULT_TIMEOUT, OPERATION));
            drop(held);
            waiter.join().unwrap().unwrap();
        });
    }
}
