//! Which images may share blocks, in an extended attribute of them: only those took part in a clone.

use std::ffi::CStr;
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::made_from;
use crate::error::{Context, Result};
use crate::sys::xattr;

/// On an image that was made from another, or another from it.
const SHARES: &CStr = c"trusted.loopfs.shares";

/// Says that the image's blocks may be shared, before they are: a crash leaves a mark too many.
pub(crate) fn mark(image: impl AsFd) -> Result<(), Errno> {
    xattr::set(image, SHARES, b"yes")
}

/// Whether some of the image's blocks may be in other files too.
pub(crate) fn may_share(image: impl AsFd) -> Result<bool> {
    let image = image.as_fd();
    let marked = xattr::get(image, SHARES).context("read the attributes of", "an image")?;
    // Earlier versions marked sources only.
    Ok(marked.is_some() || made_from::read(image)?.is_some())
}
