//! Two sizes of an image, as decimal digits in extended attributes of it: how large it was made, and how much of it its
//! loop devices show.
//!
//! The first is there because a file that somebody cut off would otherwise be a
//! smaller volume, and nobody could tell.
//!
//! It is written after the size and read before it, and a size only grows. So it is never more than the size of an image
//! that is whole, whoever grows it meanwhile and wherever that one dies.

use std::ffi::CStr;
use std::fmt::Display;
use std::os::fd::AsFd;

use nix::errno::Errno;

use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::xattr;
use crate::units::Bytes;

const CAPACITY: &CStr = c"trusted.loopfs.capacity";
const DEVICE_SIZE: &CStr = c"trusted.loopfs.refreshed";

/// Records the size of an image that has no name yet, or whose lock is held.
pub(crate) fn write_capacity(image: impl AsFd, capacity: Bytes) -> Result<()> {
    write(image, CAPACITY, capacity).context("record the capacity of", "an image")
}

/// None for an image of an earlier version, which is as large as it is.
pub(crate) fn read_capacity(image: impl AsFd) -> Result<Option<Bytes>> {
    read(image, CAPACITY, "read the capacity of", "an image")
}

/// Records the size of the devices of an image that has no name yet, or as `Volume::record_refreshed` says.
pub(crate) fn write_device_size(image: impl AsFd, size: Bytes) -> std::result::Result<(), Errno> {
    write(image, DEVICE_SIZE, size)
}

/// None for an image of an earlier version.
pub(crate) fn read_device_size(
    image: impl AsFd,
    operation: &'static str,
    object: impl Display,
) -> Result<Option<Bytes>> {
    read(image, DEVICE_SIZE, operation, object)
}

fn write(file: impl AsFd, name: &CStr, Bytes(size): Bytes) -> std::result::Result<(), Errno> {
    xattr::set(file, name, size.to_string().as_bytes())
}

/// None where there is none.
fn read(
    file: impl AsFd,
    name: &CStr,
    operation: &'static str,
    object: impl Display,
) -> Result<Option<Bytes>> {
    let Some(value) = xattr::get(file, name).context(operation, &object)? else { return Ok(None) };
    let text = String::from_utf8_lossy(&value);
    match text.parse() {
        Ok(size) => Ok(Some(Bytes(size))),
        Err(_not_a_number) => {
            Err(Error::new(ErrorKind::Other, operation, object, format!("{text:?} is not understood")))
        }
    }
}
