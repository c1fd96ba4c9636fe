//! Which images may share blocks, in an extended attribute of them: only those took part in a clone.

use std::ffi::CStr;
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::attribute;
use crate::error::Result;
use crate::sys::xattr;

/// The attribute of an image that was cloned from another, or that another was cloned from.
const SHARES: &CStr = c"trusted.loopfs.shares";

/// Marks an image whose blocks may be shared, before they are. After a crash an image may be marked that shares none.
pub(crate) fn mark(image: impl AsFd) -> Result<(), Errno> {
    xattr::set(image, SHARES, b"yes")
}

/// Returns `true` if the image may share blocks with other files.
pub(crate) fn may_share(image: impl AsFd) -> Result<bool> {
    attribute::is_set(image, SHARES, "an image")
}
