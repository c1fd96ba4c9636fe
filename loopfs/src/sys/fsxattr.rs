//! `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR` (ioctl_xfs_fsgetxattr(2), linux/fs.h).

use std::os::fd::AsFd;

pub(crate) use linux_raw_sys::general::{FS_XFLAG_PROJINHERIT, fsxattr};
use linux_raw_sys::ioctl::{FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR};

use super::ioctl;
use super::result::Result;

/// `FS_IOC_FSGETXATTR`. Returns EBADF on an `O_PATH` descriptor.
pub(crate) fn get(file: impl AsFd) -> Result<fsxattr> {
    let attributes = fsxattr {
        fsx_xflags: 0,
        fsx_extsize: 0,
        fsx_nextents: 0,
        fsx_projid: 0,
        fsx_cowextsize: 0,
        fsx_pad: [0; 8],
    };
    // SAFETY: FS_IOC_FSGETXATTR writes one `struct fsxattr`.
    unsafe { ioctl::with(file, FS_IOC_FSGETXATTR, attributes) }
}

/// `FS_IOC_FSSETXATTR`.
pub(crate) fn set(file: impl AsFd, attributes: &fsxattr) -> Result<()> {
    // SAFETY: FS_IOC_FSSETXATTR reads one `struct fsxattr`.
    unsafe { ioctl::with(file, FS_IOC_FSSETXATTR, *attributes) }.map(drop)
}
