//! Locks on files: of ranges, which belong to an open file description (F_OFD_SETLK, fcntl(2)); of the whole file (flock(2)); and
//! the lease that shows whether anything has a file open for writing.

use std::os::fd::{AsFd, AsRawFd};

use linux_raw_sys::general::F_SETSIG;
use nix::errno::Errno;

use super::Result;

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

/// flock(2), exclusive, without waiting. EAGAIN: another open file description has the lock. EBADF: an `O_PATH` descriptor.
pub(crate) fn try_lock_whole(file: impl AsFd) -> Result<()> {
    flock(file, libc::LOCK_EX | libc::LOCK_NB)
}

/// flock(2): releases the lock that [`try_lock_whole`] took.
pub(crate) fn unlock_whole(file: impl AsFd) -> Result<()> {
    flock(file, libc::LOCK_UN)
}

fn flock(file: impl AsFd, operation: libc::c_int) -> Result<()> {
    // SAFETY: flock takes a descriptor, which `file` keeps open, and a number.
    Errno::result(unsafe { libc::flock(file.as_fd().as_raw_fd(), operation) }).map(drop)
}

/// `F_SETLEASE`, fcntl(2): whether any open file description may write to the file, that of a loop device included. `file` is open
/// for reading only, or the answer is always yes. EACCES: neither the file's owner nor `CAP_LEASE`. EINVAL: the file system or
/// this machine has no leases.
pub(crate) fn is_open_for_writing(file: impl AsFd) -> Result<bool> {
    let raw = file.as_fd().as_raw_fd();
    // A process that opens the file for writing while there is a lease breaks it, and waits until it is given back. The
    // kernel sends a signal then, by default SIGIO, which kills; SIGURG is ignored by default.
    // SAFETY: F_SETSIG takes a descriptor and a number.
    Errno::result(unsafe { libc::fcntl(raw, F_SETSIG as libc::c_int, libc::SIGURG) })?;
    // SAFETY: F_SETLEASE takes a descriptor and a number.
    match Errno::result(unsafe { libc::fcntl(raw, libc::F_SETLEASE, libc::F_RDLCK) }) {
        Ok(_) => {}
        Err(Errno::EAGAIN) => return Ok(true),
        Err(errno) => return Err(errno),
    }
    // SAFETY: as above. EAGAIN: another thread has given back the lease of this open file description.
    Errno::result(unsafe { libc::fcntl(raw, libc::F_SETLEASE, libc::F_UNLCK) }).ok();
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_open_for_writing_as_long_as_a_writable_descriptor_is_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.into_temp_path();
        let reader = std::fs::File::open(&path).unwrap();
        assert_eq!(is_open_for_writing(&reader), Ok(false));
        assert_eq!(is_open_for_writing(&reader), Ok(false), "the lease was given back");
        let writer = std::fs::File::options().write(true).open(&path).unwrap();
        assert_eq!(is_open_for_writing(&reader), Ok(true));
        assert_eq!(is_open_for_writing(&writer), Ok(true), "its own open counts");
        drop(writer);
        assert_eq!(is_open_for_writing(&reader), Ok(false));
    }
}
