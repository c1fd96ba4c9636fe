//! Extended attributes (xattr(7)), by descriptor and by path.

use std::ffi::{CStr, CString};
use std::os::fd::AsFd;

use rustix::fs::{self, XattrFlags};
use rustix::io;

use super::result::{Result, errno};

/// `fgetxattr`: returns `None` if the attribute is not set, and EBADF on an `O_PATH` descriptor.
pub(crate) fn get(file: impl AsFd, name: &CStr) -> Result<Option<Vec<u8>>> {
    if_set(read_all(|value| fs::fgetxattr(&file, name, value)))
}

/// `fsetxattr`: creates or replaces the attribute.
pub(crate) fn set(file: impl AsFd, name: &CStr, value: &[u8]) -> Result<()> {
    fs::fsetxattr(file, name, value, XattrFlags::empty()).map_err(errno)
}

/// `fremovexattr`: removes the attribute. Succeeds if the attribute is not set.
pub(crate) fn remove(file: impl AsFd, name: &CStr) -> Result<()> {
    if_set(fs::fremovexattr(file, name)).map(drop)
}

/// The maximum size of a list of names and of a value (`XATTR_LIST_MAX`, `XATTR_SIZE_MAX` of linux/limits.h).
pub(crate) const MAX_SIZE: usize = 64 << 10;

/// `listxattr`: returns the names that are visible to the caller. The kernel lists `trusted.*` only with `CAP_SYS_ADMIN`.
/// Returns E2BIG if the names take more than [`MAX_SIZE`] bytes.
pub(crate) fn list_at(path: &CStr) -> Result<Vec<CString>> {
    read_all(|names| fs::listxattr(path, names)).map(|names| split(&names)).map_err(errno)
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
    if_set(read_all(|value| fs::getxattr(path, name, value)))
}

/// `setxattr`: creates or replaces the attribute.
pub(crate) fn set_at(path: &CStr, name: &CStr, value: &[u8]) -> Result<()> {
    fs::setxattr(path, name, value, XattrFlags::empty()).map_err(errno)
}

/// `removexattr`: removes the attribute. Succeeds if the attribute is not set.
pub(crate) fn remove_at(path: &CStr, name: &CStr) -> Result<()> {
    if_set(fs::removexattr(path, name)).map(drop)
}

/// Reads with a buffer of 256 bytes. If that is too small, reads again with the maximum size.
fn read_all(read: impl Fn(&mut [u8]) -> io::Result<usize>) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; 256];
    let length = match read(&mut buffer) {
        Err(io::Errno::RANGE) => {
            buffer.resize(MAX_SIZE, 0);
            read(&mut buffer)?
        }
        result => result?,
    };
    buffer.truncate(length);
    Ok(buffer)
}

/// Converts ENODATA, which the kernel returns for an attribute that is not set, into `None`.
fn if_set<T>(result: io::Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(io::Errno::NODATA) => Ok(None),
        Err(error) => Err(errno(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_split_at_nuls() {
        assert_eq!(split(b""), Vec::<CString>::new());
        assert_eq!(split(b"user.a\0user.b=\0"), [c"user.a".to_owned(), c"user.b=".to_owned()]);
        assert_eq!(split(b"user.a\0cut"), [c"user.a".to_owned()]);
    }
}
