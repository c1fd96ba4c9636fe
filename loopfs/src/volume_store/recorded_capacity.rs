//! How large an image was made, in an extended attribute of it: a file that somebody cut off would otherwise be a
//! smaller volume, and nobody could tell.
//!
//! It is written after the size and read before it, and a size only grows. So it is never more than the size of an image
//! that is whole, whoever grows it meanwhile and wherever that one dies.

use std::ffi::CStr;
use std::os::fd::AsFd;

use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::xattr;
use crate::units::Bytes;

const NAME: &CStr = c"trusted.loopfs.capacity";

/// Records the size of an image that has no name yet, or whose lock is held.
pub(super) fn write(image: impl AsFd, Bytes(capacity): Bytes) -> Result<()> {
    xattr::set(image, NAME, capacity.to_string().as_bytes()).context("record the capacity of", "an image")
}

/// None for an image of an earlier version, which is as large as it is.
pub(super) fn read(image: impl AsFd) -> Result<Option<Bytes>> {
    const OPERATION: &str = "read the capacity of";
    let Some(value) = xattr::get(image, NAME).context(OPERATION, "an image")? else { return Ok(None) };
    let text = String::from_utf8_lossy(&value);
    match text.parse() {
        Ok(capacity) => Ok(Some(Bytes(capacity))),
        Err(_not_a_number) => {
            Err(Error::new(ErrorKind::Other, OPERATION, "an image", format!("{text:?} is not understood")))
        }
    }
}
