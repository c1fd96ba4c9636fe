//! Two sizes of an image, as decimal digits in extended attributes of it: its capacity, and the size that its loop devices are known
//! to have.
//!
//! Without a recorded capacity, a truncated image would look like a smaller volume. The capacity is written after the size of the
//! file changes and read before that size, and a size only grows. So the recorded capacity is never more than the size of an image
//! that is not truncated, even if another process expands the image concurrently or dies while it does.

use std::ffi::CStr;
use std::fmt::Display;
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::attribute;
use crate::error::{Context, Result};
use crate::sys::xattr;
use crate::units::Bytes;

const CAPACITY: &CStr = c"trusted.loopfs.capacity";
const DEVICE_SIZE: &CStr = c"trusted.loopfs.refreshed";

/// Records the size of an image that has no name yet, or whose lock is held.
pub(crate) fn write_capacity(image: impl AsFd, capacity: Bytes) -> Result<()> {
    write(image, CAPACITY, capacity).context("record the capacity of", "an image")
}

/// Reads the recorded capacity.
pub(crate) fn read_capacity(image: impl AsFd) -> Result<Bytes> {
    attribute::require(image, CAPACITY, "read the capacity of", "an image", parse)
}

/// Records the size of the devices of an image that has no name yet, or as `Volume::record_device_size` says.
pub(crate) fn write_device_size(image: impl AsFd, size: Bytes) -> std::result::Result<(), Errno> {
    write(image, DEVICE_SIZE, size)
}

/// Reads the recorded device size.
pub(crate) fn read_device_size(
    image: impl AsFd,
    operation: &'static str,
    object: impl Display,
) -> Result<Bytes> {
    attribute::require(image, DEVICE_SIZE, operation, object, parse)
}

fn write(file: impl AsFd, name: &CStr, Bytes(size): Bytes) -> std::result::Result<(), Errno> {
    xattr::set(file, name, size.to_string().as_bytes())
}

fn parse(text: &str) -> Option<Bytes> {
    text.parse().ok().map(Bytes)
}
