//! Extended attributes by descriptor (fgetxattr(2), fsetxattr(2)).

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

use super::Result;

/// `fgetxattr`: None where the attribute is not set. EBADF on an O_PATH descriptor.
pub(crate) fn get(file: impl AsFd, name: &CStr) -> Result<Option<Vec<u8>>> {
    let fd = file.as_fd().as_raw_fd();
    let mut value = vec![0u8; 256];
    // SAFETY: fgetxattr reads a NUL-terminated name and writes at most the length told.
    let length = unsafe { libc::fgetxattr(fd, name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    match Errno::result(length) {
        Ok(length) => {
            value.truncate(length as usize);
            Ok(Some(value))
        }
        Err(Errno::ENODATA) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// `fsetxattr`, creating or replacing.
pub(crate) fn set(file: impl AsFd, name: &CStr, value: &[u8]) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: fsetxattr reads a NUL-terminated name and the length told.
    let result = unsafe { libc::fsetxattr(fd, name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    Errno::result(result).map(drop)
}
