//! Leases of files (F_SETLEASE, fcntl(2)).

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

use super::Result;

/// Takes a lease of `kind` (`F_RDLCK`, `F_WRLCK`) on a file, or gives it back (`F_UNLCK`). EAGAIN: the file is open elsewhere
/// in a way that conflicts. EACCES: the file is another user's, and the caller has no `CAP_LEASE`. EINVAL: the file system
/// has no leases, or `fs.leases-enable` is 0.
pub(crate) fn set(file: impl AsFd, kind: i32) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: F_SETLEASE takes an integer and no pointer.
    let result = unsafe { libc::fcntl(fd, libc::F_SETLEASE, kind) };
    Errno::result(result).map(drop)
}

/// Chooses the signal that says that a lease of this open file description is being broken (F_SETSIG, fcntl(2)). Without this
/// call it is SIGIO, which ends a process that does not handle it.
pub(crate) fn set_signal(file: impl AsFd, signal: i32) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: F_SETSIG takes an integer and no pointer.
    let result = unsafe { libc::fcntl(fd, linux_raw_sys::general::F_SETSIG as i32, signal) };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_numbers_match_fcntl_h() {
        assert_eq!(libc::F_SETLEASE, linux_raw_sys::general::F_SETLEASE as i32);
        assert_eq!(linux_raw_sys::general::F_SETSIG, 10);
    }
}
