//! Freezing a file system (ioctl_fsfreeze).

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
use nix::errno::Errno;

use super::result::Result;

ioctl!(readwrite fifreeze with b'X', 119; libc::c_int);
ioctl!(readwrite fithaw with b'X', 120; libc::c_int);

/// `FIFREEZE`: writes wait from now on. EBUSY if it is frozen, EPERM without `CAP_SYS_ADMIN`.
pub(crate) fn freeze(file: impl AsFd) -> Result<()> {
    let mut unused = 0;
    // SAFETY: FIFREEZE does not use its argument, which is one int by its declaration.
    let result = unsafe { fifreeze(file.as_fd().as_raw_fd(), &mut unused) };
    Errno::result(result).map(drop)
}

/// `FITHAW`: writes go on. EINVAL if it is not frozen.
pub(crate) fn thaw(file: impl AsFd) -> Result<()> {
    let mut unused = 0;
    // SAFETY: FITHAW does not use its argument, which is one int by its declaration.
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
