//! Calls that only tests make.

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ior;
use linux_raw_sys::ioctl::{BLKDISCARD, FIFREEZE, FITHAW};
use linux_raw_sys::loop_device as uapi;

use super::ioctl;
use super::result::Result;

/// `LOOP_SET_FD`: binds the device to a file.
pub(crate) fn set_file(device: impl AsFd, file: impl AsFd) -> Result<()> {
    let file = file.as_fd().as_raw_fd().cast_unsigned();
    // SAFETY: LOOP_SET_FD takes an integer.
    unsafe { ioctl::by_value(device, uapi::LOOP_SET_FD, file.into()) }.map(drop)
}

/// `LOOP_CHANGE_FD`: binds a read-only device to another file of the same size.
pub(crate) fn change_file(device: impl AsFd, file: impl AsFd) -> Result<()> {
    let file = file.as_fd().as_raw_fd().cast_unsigned();
    // SAFETY: LOOP_CHANGE_FD takes an integer.
    unsafe { ioctl::by_value(device, uapi::LOOP_CHANGE_FD, file.into()) }.map(drop)
}

/// `BLKDISCARD`: discards the content of a range of the device, in bytes. Returns EOPNOTSUPP if discards are disabled or
/// unsupported on the device.
pub(crate) fn discard(device: impl AsFd, start: u64, length: u64) -> Result<()> {
    // SAFETY: BLKDISCARD reads two u64.
    unsafe { ioctl::with(device, BLKDISCARD, [start, length]) }.map(drop)
}

/// `FIFREEZE`: blocks all writes to the file system. Returns EBUSY if it is already frozen, and EPERM without
/// `CAP_SYS_ADMIN`.
pub(crate) fn freeze(file: impl AsFd) -> Result<()> {
    // SAFETY: FIFREEZE does not use its argument.
    unsafe { ioctl::by_value(file, FIFREEZE, 0) }.map(drop)
}

/// `FITHAW`: unblocks the writes to the file system. Returns EINVAL if it is not frozen.
pub(crate) fn thaw(file: impl AsFd) -> Result<()> {
    // SAFETY: FITHAW does not use its argument.
    unsafe { ioctl::by_value(file, FITHAW, 0) }.map(drop)
}

pub(super) const XFS_IOC_GOINGDOWN: u32 = ior!(b'X', 125, size_of::<u32>());

/// `XFS_IOC_GOINGDOWN` with `XFS_FSOP_GOING_FLAGS_NOLOGFLUSH`. Returns EPERM without `CAP_SYS_ADMIN`.
pub(crate) fn shut_down_xfs(file: impl AsFd) -> Result<()> {
    const NO_LOG_FLUSH: u32 = 2;
    // SAFETY: XFS_IOC_GOINGDOWN reads one u32.
    unsafe { ioctl::with(file, XFS_IOC_GOINGDOWN, NO_LOG_FLUSH) }.map(drop)
}
