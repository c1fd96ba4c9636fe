//! Where a file was last attached, kept on the file itself as an extended attribute.
//!
//! A hint makes the search for a file's device constant instead of a walk over all devices. It
//! is never believed: the device it names must be bound to the file. It is written before the
//! device is bound, so a crash leaves a hint without a device and not the reverse.
//!
//! `trusted.*` attributes can only be written with `CAP_SYS_ADMIN`; where they cannot be had the
//! search walks over all devices.

use std::ffi::CStr;
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::Access;

const READ_WRITE: &CStr = c"trusted.loopfs.device";
const READ_ONLY: &CStr = c"trusted.loopfs.device-ro";
const NEVER: &[u8] = b"none";

/// What a file says of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hint {
    /// Attachments of this file are not recorded.
    Absent,
    /// They are, and there is none.
    NotAttached,
    /// The index it was last attached to.
    Index(u32),
}

fn name(access: Access) -> &'static CStr {
    match access {
        Access::ReadWrite => READ_WRITE,
        Access::ReadOnly => READ_ONLY,
    }
}

pub(crate) fn read(file: impl AsFd, access: Access) -> Hint {
    match crate::sys::xattr::get(file, name(access)) {
        Ok(Some(value)) if value == NEVER => Hint::NotAttached,
        Ok(Some(value)) => std::str::from_utf8(&value)
            .ok()
            .and_then(|text| text.parse().ok())
            .map_or(Hint::Absent, Hint::Index),
        Ok(None) | Err(_) => Hint::Absent,
    }
}

pub(crate) fn write(file: impl AsFd, access: Access, index: u32) -> Result<(), Errno> {
    crate::sys::xattr::set(file, name(access), index.to_string().as_bytes())
}

/// Says that from now on attachments of the file are recorded.
pub(crate) fn start(file: impl AsFd) -> Result<(), Errno> {
    let file = file.as_fd();
    [READ_WRITE, READ_ONLY].into_iter().try_for_each(|name| crate::sys::xattr::set(file, name, NEVER))
}

/// Says that there is no attachment.
pub(crate) fn clear(file: impl AsFd, access: Access) -> Result<(), Errno> {
    crate::sys::xattr::set(file, name(access), NEVER)
}
