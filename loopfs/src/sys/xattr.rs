//! Extended attributes (xattr(7)), by descriptor and by path.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

use super::result::Result;

/// `fgetxattr`: returns `None` if the attribute is not set, and EBADF on an `O_PATH` descriptor.
pub(crate) fn get(file: impl AsFd, name: &CStr) -> Result<Option<Vec<u8>>> {
    let fd = file.as_fd().as_raw_fd();
    let mut value = vec![0u8; 256];
    // SAFETY: fgetxattr reads a NUL-terminated name and writes at most the given length.
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

/// `fsetxattr`: creates or replaces the attribute.
pub(crate) fn set(file: impl AsFd, name: &CStr, value: &[u8]) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: fsetxattr reads a NUL-terminated name and a value of the given length.
    let result = unsafe { libc::fsetxattr(fd, name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    Errno::result(result).map(drop)
}

/// `fremovexattr`: removes the attribute. Succeeds if the attribute is not set.
pub(crate) fn remove(file: impl AsFd, name: &CStr) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: fremovexattr reads a NUL-terminated name.
    let result = unsafe { libc::fremovexattr(fd, name.as_ptr()) };
    match Errno::result(result) {
        Ok(_) | Err(Errno::ENODATA) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// The maximum size of a list of names and of a value (`XATTR_LIST_MAX`, `XATTR_SIZE_MAX` of linux/limits.h).
pub(crate) const MAX_SIZE: usize = 64 << 10;

/// `listxattr`: returns the names that are visible to the caller. The kernel lists `trusted.*` only with `CAP_SYS_ADMIN`.
/// Returns E2BIG if the names take more than [`MAX_SIZE`] bytes.
pub(crate) fn list_at(path: &CStr) -> Result<Vec<CString>> {
    let mut size = 256;
    loop {
        let mut names = vec![0u8; size];
        // SAFETY: listxattr reads a NUL-terminated path and writes at most the given length.
        let length = unsafe { libc::listxattr(path.as_ptr(), names.as_mut_ptr().cast(), names.len()) };
        match Errno::result(length) {
            Ok(length) => return Ok(split(&names[..length as usize])),
            Err(Errno::ERANGE) if size < MAX_SIZE => size = MAX_SIZE,
            Err(errno) => return Err(errno),
        }
    }
}

/// Splits a list of names, each of which ends with NUL.
fn split(names: &[u8]) -> Vec<CString> {
    names
        .split_inclusive(|byte| *byte == 0)
        .filter_map(|name| CStr::from_bytes_with_nul(name).ok())
        .map(CStr::to_owned)
        .collect()
}

/// `getxattr`: returns `None` if the attribute is not set.
pub(crate) fn get_at(path: &CStr, name: &CStr) -> Result<Option<Vec<u8>>> {
    let mut size = 256;
    loop {
        let mut value = vec![0u8; size];
        // SAFETY: getxattr reads two NUL-terminated strings and writes at most the given length.
        let length =
            unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
        match Errno::result(length) {
            Ok(length) => {
                value.truncate(length as usize);
                return Ok(Some(value));
            }
            Err(Errno::ENODATA) => return Ok(None),
            Err(Errno::ERANGE) if size < MAX_SIZE => size = MAX_SIZE,
            Err(errno) => return Err(errno),
        }
    }
}

/// `setxattr`: creates or replaces the attribute.
pub(crate) fn set_at(path: &CStr, name: &CStr, value: &[u8]) -> Result<()> {
    // SAFETY: setxattr reads two NUL-terminated strings and a value of the given length.
    let result =
        unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    Errno::result(result).map(drop)
}

/// `removexattr`: removes the attribute. Succeeds if the attribute is not set.
pub(crate) fn remove_at(path: &CStr, name: &CStr) -> Result<()> {
    // SAFETY: removexattr reads two NUL-terminated strings.
    let result = unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) };
    match Errno::result(result) {
        Ok(_) | Err(Errno::ENODATA) => Ok(()),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_split_at_each_nul() {
        assert_eq!(split(b""), Vec::<CString>::new());
        assert_eq!(split(b"user.a\0user.b=\0"), [c"user.a".to_owned(), c"user.b=".to_owned()]);
        assert_eq!(split(b"user.a\0cut"), [c"user.a".to_owned()]);
    }
}
