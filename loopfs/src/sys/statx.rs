//! `statx(2)` for the fields that stat(2) does not have.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

use super::Result;

/// `stx_mnt_id` (Linux 5.8): which mount the file was reached through, as in the first field of
/// a line of `/proc/self/mountinfo`. None on a kernel that does not tell.
pub(crate) fn mount_id(file: impl AsFd) -> Result<Option<u64>> {
    let fd = file.as_fd().as_raw_fd();
    let mut buffer = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: statx reads the empty path and writes one `struct statx`.
    let result = unsafe {
        libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_MNT_ID, buffer.as_mut_ptr())
    };
    Errno::result(result)?;
    // SAFETY: all-zero is a valid `struct statx`, and the call above has filled it.
    let status = unsafe { buffer.assume_init() };
    Ok((status.stx_mask & libc::STATX_MNT_ID != 0).then_some(status.stx_mnt_id))
}
