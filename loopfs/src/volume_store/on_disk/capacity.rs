//! The capacity of an image, as decimal digits in an extended attribute of it.
//!
//! Without a recorded capacity, a truncated image would look like a smaller volume. The capacity is written after the size of the
//! file changes and read before that size, and a size only grows. So the recorded capacity is never more than the size of an image
//! that is not truncated, even if another process expands the image concurrently or dies while it does.

use std::ffi::CStr;
use std::os::fd::AsFd;

use super::attribute;
use crate::error::{Context, Result};
use crate::sys::xattr;
use crate::units::Bytes;

const CAPACITY: &CStr = c"trusted.loopfs.capacity";

/// Records the size of an image that has no name yet, or whose lock is held.
pub(crate) fn write(image: impl AsFd, Bytes(capacity): Bytes) -> Result<()> {
    xattr::set(image, CAPACITY, capacity.to_string().as_bytes()).context("record the capacity of", "an image")
}

/// Reads the recorded capacity.
pub(crate) fn read(image: impl AsFd) -> Result<Bytes> {
    let parse = |text: &str| text.parse().ok().map(Bytes);
    attribute::require(image, CAPACITY, "read the capacity of", "an image", parse)
}
