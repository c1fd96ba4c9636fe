//! `FS_IOC_GETVERSION` (linux/fs.h, ioctl_iflags(2)): the generation of an inode. It distinguishes inodes that had the same
//! number one after the other.

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
use nix::errno::Errno;

use super::result::Result;

ioctl!(read fs_ioc_getversion with b'v', 1; libc::c_long);

/// `FS_IOC_GETVERSION`. Returns ENOTTY if the file system does not support the ioctl, and EBADF on an `O_PATH` descriptor.
pub(crate) fn get(file: impl AsFd) -> Result<libc::c_long> {
    let fd = file.as_fd().as_raw_fd();
    let mut generation = 0;
    // SAFETY: FS_IOC_GETVERSION writes an int, although its number declares a long. `generation` holds the larger of the two.
    let result = unsafe { fs_ioc_getversion(fd, &mut generation) };
    Errno::result(result).map(|_| generation)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_request_matches_the_kernel_headers() {
        let request = ioctl_sys::ior!(b'v', 1, size_of::<libc::c_long>());
        assert_eq!(request, linux_raw_sys::ioctl::FS_IOC_GETVERSION);
    }
}
