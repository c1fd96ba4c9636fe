//! `FICLONE` (ioctl_ficlone(2), linux/fs.h).

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::without_provenance_mut;

use ioctl_sys::ioctl;
use linux_raw_sys::ioctl::FICLONE;
use nix::errno::Errno;

use super::Result;

// Declared to write an int, and takes the int itself where its address would be.
ioctl!(bad ficlone with FICLONE);

/// `FICLONE` (Linux 4.5): makes `target`, open for writing, a file that shares all blocks of `source`.
/// EOPNOTSUPP where the file system cannot share blocks, EXDEV between file systems.
pub(crate) fn clone(source: impl AsFd, target: impl AsFd) -> Result<()> {
    let (source, target) = (source.as_fd().as_raw_fd(), target.as_fd().as_raw_fd());
    // SAFETY: FICLONE takes a descriptor by value; no memory is read or written.
    let result = unsafe { ficlone(target, without_provenance_mut(source as usize)) };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_matches_the_kernel_headers() {
        assert_eq!(ioctl_sys::iow!(0x94, 9, size_of::<libc::c_int>()), FICLONE);
    }
}
