//! File locks: byte-range locks that belong to an open file description (F_OFD_SETLK, fcntl(2)), and locks of the whole file
//! (flock(2)).

use std::os::fd::AsFd;

use rustix::fs::{FlockOperation, flock};

use super::result::{Result, errno};

/// Describes a lock of `length` bytes from `start`. Length 0 extends the lock to any end of the file. `kind` is a lock type such
/// as `F_WRLCK`.
pub(crate) fn lock_of(kind: i32, start: i64, length: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: length,
        l_pid: 0,
    }
}

/// flock(2), exclusive, without waiting. Returns EAGAIN if another open file description holds the lock, and EBADF on an
/// `O_PATH` descriptor.
pub(crate) fn try_lock_whole(file: impl AsFd) -> Result<()> {
    flock(file, FlockOperation::NonBlockingLockExclusive).map_err(errno)
}

/// flock(2): releases the lock that [`try_lock_whole`] took.
pub(crate) fn unlock_whole(file: impl AsFd) -> Result<()> {
    flock(file, FlockOperation::Unlock).map_err(errno)
}
