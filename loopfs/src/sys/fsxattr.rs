//! `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR` (ioctl_xfs_fsgetxattr(2), linux/fs.h).

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
pub(crate) use linux_raw_sys::general::{FS_XFLAG_PROJINHERIT, fsxattr};
use nix::errno::Errno;

use super::result::Result;

ioctl!(read fs_get_xattr with b'X', 31; fsxattr);
ioctl!(write fs_set_xattr with b'X', 32; fsxattr);

/// `FS_IOC_FSGETXATTR`. Returns EBADF on an `O_PATH` descriptor.
pub(crate) fn get(file: impl AsFd) -> Result<fsxattr> {
    let fd = file.as_fd().as_raw_fd();
    let mut attributes = fsxattr {
        fsx_xflags: 0,
        fsx_extsize: 0,
        fsx_nextents: 0,
        fsx_projid: 0,
        fsx_cowextsize: 0,
        fsx_pad: [0; 8],
    };
    // SAFETY: FS_IOC_FSGETXATTR writes one `struct fsxattr`.
    let result = unsafe { fs_get_xattr(fd, &mut attributes) };
    Errno::result(result).map(|_| attributes)
}

/// `FS_IOC_FSSETXATTR`.
pub(crate) fn set(file: impl AsFd, attributes: &fsxattr) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: FS_IOC_FSSETXATTR reads one `struct fsxattr`.
    let result = unsafe { fs_set_xattr(fd, attributes) };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_match_the_kernel_headers() {
        assert_eq!(size_of::<fsxattr>(), 28);
        assert_eq!(ioctl_sys::ior!(b'X', 31, size_of::<fsxattr>()), linux_raw_sys::ioctl::FS_IOC_FSGETXATTR);
        assert_eq!(ioctl_sys::iow!(b'X', 32, size_of::<fsxattr>()), linux_raw_sys::ioctl::FS_IOC_FSSETXATTR);
    }
}
