//! `statx(2)`, for the fields that stat(2) does not return.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

use super::result::Result;

/// Returns `stx_mnt_id` (Linux 5.8), the id of the mount through which the file was opened. It is the first field of a line
/// of `/proc/self/mountinfo`. Returns `None` if the kernel does not report it.
pub(crate) fn mount_id(file: impl AsFd) -> Result<Option<u64>> {
    let status = read(file, libc::STATX_MNT_ID)?;
    Ok((status.stx_mask & libc::STATX_MNT_ID != 0).then_some(status.stx_mnt_id))
}

/// Returns `true` if the file is the root of a mount (`STATX_ATTR_MOUNT_ROOT`, Linux 5.8).
pub(crate) fn is_mount_root(file: impl AsFd) -> Result<bool> {
    const MOUNT_ROOT: u64 = libc::STATX_ATTR_MOUNT_ROOT as u64;
    let status = read(file, 0)?;
    Ok(status.stx_attributes & status.stx_attributes_mask & MOUNT_ROOT != 0)
}

/// Returns `stx_dio_offset_align` (Linux 6.1), the alignment of direct I/O on the file in bytes. Returns 512 if the kernel
/// does not report it.
pub(crate) fn direct_io_alignment(file: impl AsFd) -> Result<u32> {
    let status = read(file, libc::STATX_DIOALIGN)?;
    let reported = status.stx_mask & libc::STATX_DIOALIGN != 0 && status.stx_dio_offset_align != 0;
    Ok(if reported { status.stx_dio_offset_align } else { 512 })
}

fn read(file: impl AsFd, mask: libc::c_uint) -> Result<libc::statx> {
    let fd = file.as_fd().as_raw_fd();
    let mut buffer = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: statx reads the empty path and writes one `struct statx`.
    let result = unsafe { libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, mask, buffer.as_mut_ptr()) };
    Errno::result(result)?;
    // SAFETY: all-zero is a valid `struct statx`, and the call above has filled it.
    Ok(unsafe { buffer.assume_init() })
}
