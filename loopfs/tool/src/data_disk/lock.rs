//! Advisory locks of whole files (flock(2)), acquired with a timeout.

use std::fs::{File, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;

/// Locks a file exclusively. Returns `false` if another process holds the lock for as long as `timeout`. The lock ends with the last
/// descriptor of the open file.
pub(crate) fn exclusive(file: &File, timeout: Duration) -> Result<bool> {
    let end = Instant::now() + timeout;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if Instant::now() < end => sleep(Duration::from_millis(10)),
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
    }
}
