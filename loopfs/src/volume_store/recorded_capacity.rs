//! How large an image was made, in an extended attribute of it: a file that somebody cut off would otherwise be a
//! smaller volume, and nobody could tell.
//!
//! It is written after the size and read before it, and a size only grows. So it is never more than the size of an image
//! that is whole, whoever grows it meanwhile and wherever that one dies.

use std::ffi::CStr;
use std::os::fd::AsFd;

use super::size_attribute;
use crate::error::{Context, Result};
use crate::units::Bytes;

const NAME: &CStr = c"trusted.loopfs.capacity";

/// Records the size of an image that has no name yet, or whose lock is held.
pub(super) fn write(image: impl AsFd, capacity: Bytes) -> Result<()> {
    size_attribute::write(image, NAME, capacity).context("record the capacity of", "an image")
}

/// None for an image of an earlier version, which is as large as it is.
pub(super) fn read(image: impl AsFd) -> Result<Option<Bytes>> {
    size_attribute::read(image, NAME, "read the capacity of", "an image")
}
