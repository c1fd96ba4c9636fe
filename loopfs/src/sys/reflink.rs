//! `FICLONE` and `FICLONERANGE` (ioctl_ficlonerange(2), linux/fs.h).

use std::os::fd::{AsFd, AsRawFd};

use linux_raw_sys::general::file_clone_range;
use linux_raw_sys::ioctl::FICLONERANGE;
use rustix::fs::ioctl_ficlone;

use super::ioctl;
use super::result::{Result, errno};

/// `FICLONE` (Linux 4.5): makes `target`, which must be open for writing, share all blocks of `source`. Returns
/// EOPNOTSUPP if the file system cannot share blocks, and EXDEV between file systems.
pub(crate) fn clone(source: impl AsFd, target: impl AsFd) -> Result<()> {
    ioctl_ficlone(target, source).map_err(errno)
}

/// `FICLONERANGE`: makes `target` share the blocks of `source` from `offset` to the end, at the same offset. `offset` must
/// be a multiple of the file system's block size.
pub(crate) fn clone_rest(source: impl AsFd, offset: u64, target: impl AsFd) -> Result<()> {
    let source = source.as_fd().as_raw_fd();
    let range =
        file_clone_range { src_fd: source.into(), src_offset: offset, src_length: 0, dest_offset: offset };
    // SAFETY: FICLONERANGE reads one `struct file_clone_range`.
    unsafe { ioctl::with(target, FICLONERANGE, range) }.map(drop)
}
