//! Locks on ranges of a file that belong to its open file description (F_OFD_SETLK, fcntl(2)).

/// A lock of `length` bytes from `start`, or up to any end where that is 0; `kind` is `F_WRLCK` and the like.
pub(crate) fn lock_of(kind: i32, start: i64, length: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: length,
        l_pid: 0,
    }
}
