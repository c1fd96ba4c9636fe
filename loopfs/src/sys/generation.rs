//! `FS_IOC_GETVERSION` (linux/fs.h, ioctl_iflags(2)): the generation of an inode. It distinguishes inodes that had the same
//! number one after the other.

use std::os::fd::AsFd;

use linux_raw_sys::ioctl::FS_IOC_GETVERSION;

use super::ioctl;
use super::result::Result;

/// `FS_IOC_GETVERSION`. Returns ENOTTY if the file system does not support the ioctl, and EBADF on an `O_PATH` descriptor.
pub(crate) fn get(file: impl AsFd) -> Result<libc::c_long> {
    // SAFETY: FS_IOC_GETVERSION writes an int, although its number declares a long, which is the larger of the two.
    unsafe { ioctl::with(file, FS_IOC_GETVERSION, 0) }
}
