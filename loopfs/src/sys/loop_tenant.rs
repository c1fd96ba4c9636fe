//! Calls of the loop driver that this library does not make, and that any process can make that has a device open. For tests.

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
use linux_raw_sys::loop_device as uapi;
use nix::errno::Errno;

use super::loop_abi::{empty_info, loop_info64};
use super::result::Result;

ioctl!(arg loop_set_fd with b'L', 0x00);
ioctl!(arg loop_change_fd with b'L', 0x06);
ioctl!(bad read loop_get_status64 with uapi::LOOP_GET_STATUS64; loop_info64);
ioctl!(bad write loop_set_status64 with uapi::LOOP_SET_STATUS64; loop_info64);

/// `LOOP_SET_FD`: binds the device to a file.
pub(crate) fn set_file(device: impl AsFd, file: impl AsFd) -> Result<()> {
    // SAFETY: LOOP_SET_FD takes a descriptor by value.
    let result = unsafe { loop_set_fd(device.as_fd().as_raw_fd(), file.as_fd().as_raw_fd() as _) };
    Errno::result(result).map(drop)
}

/// `LOOP_CHANGE_FD`: binds a read-only device to another file of the same size.
pub(crate) fn change_file(device: impl AsFd, file: impl AsFd) -> Result<()> {
    // SAFETY: LOOP_CHANGE_FD takes a descriptor by value.
    let result = unsafe { loop_change_fd(device.as_fd().as_raw_fd(), file.as_fd().as_raw_fd() as _) };
    Errno::result(result).map(drop)
}

/// `LOOP_SET_STATUS64`.
pub(crate) fn change_status(device: impl AsFd, change: impl FnOnce(&mut loop_info64)) -> Result<()> {
    let fd = device.as_fd().as_raw_fd();
    let mut info = empty_info();
    // SAFETY: LOOP_GET_STATUS64 writes one `struct loop_info64`, which `info` is.
    Errno::result(unsafe { loop_get_status64(fd, &mut info) })?;
    change(&mut info);
    // SAFETY: LOOP_SET_STATUS64 reads one `struct loop_info64`, which `info` is.
    Errno::result(unsafe { loop_set_status64(fd, &info) }).map(drop)
}
