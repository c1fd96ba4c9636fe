//! Freezing a file system (ioctl_fsfreeze).

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
use nix::errno::Errno;

use super::result::Result;

ioctl!(readwrite fifreeze with b'X', 119; libc::c_int);
ioctl!(readwrite fithaw with b'X', 120; libc::c_int);

/// `FIFREEZE`: blocks all writes to the file system. Returns EBUSY if it is already frozen, and EPERM without
/// `CAP_SYS_ADMIN`.
pub(crate) fn freeze(file: impl AsFd) -> Result<()> {
    let mut unused = 0;
    // SAFETY: FIFREEZE does not use its argument, which the header declares as one int.
    let result = unsafe { fifreeze(file.as_fd().as_raw_fd(), &mut unused) };
    Errno::result(result).map(drop)
}

/// `FITHAW`: unblocks the writes to the file system. Returns EINVAL if it is not frozen.
pub(crate) fn thaw(file: impl AsFd) -> Result<()> {
    let mut unused = 0;
    // SAFETY: FITHAW does not use its argument, which the header declares as one int.
    let result = unsafe { fithaw(file.as_fd().as_raw_fd(), &mut unused) };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_match_fs_h() {
        // _IOWR('X', 119, int) and _IOWR('X', 120, int).
        assert_eq!(ioctl_sys::iorw!(b'X', 119, size_of::<libc::c_int>()), 0xc004_5877);
        assert_eq!(ioctl_sys::iorw!(b'X', 120, size_of::<libc::c_int>()), 0xc004_5878);
    }
}
