//! `ioctl(2)` in the two forms of its argument. The numbers of the requests are those of linux-raw-sys, or the
//! macros of ioctl-sys compose them.

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

use super::result::Result;

/// Makes a request that reads, writes or changes one structure. Returns the structure.
///
/// # Safety
/// The request must take a pointer to a `T`, and what it writes there must be a valid `T`.
pub(super) unsafe fn with<T>(file: impl AsFd, request: u32, mut argument: T) -> Result<T> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the argument is a pointer to a `T`, as the request requires.
    let result = unsafe { ioctl_sys::ioctl(fd, request.into(), &raw mut argument) };
    Errno::result(result).map(|_| argument)
}

/// Makes a request that takes an integer or nothing. Returns the result of the call.
///
/// # Safety
/// The request must not take a pointer.
#[cfg(any(not(test), feature = "__tests"))]
pub(super) unsafe fn by_value(file: impl AsFd, request: u32, argument: libc::c_ulong) -> Result<u32> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the argument is an integer, as the request requires.
    let result = unsafe { ioctl_sys::ioctl(fd, request.into(), argument) };
    Errno::result(result).map(|value| value as u32)
}
