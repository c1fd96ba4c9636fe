//! A size in an extended attribute, as decimal digits.

use std::ffi::CStr;
use std::fmt::Display;
use std::os::fd::AsFd;

use nix::errno::Errno;

use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::xattr;
use crate::units::Bytes;

pub(super) fn write(file: impl AsFd, name: &CStr, Bytes(size): Bytes) -> std::result::Result<(), Errno> {
    xattr::set(file, name, size.to_string().as_bytes())
}

/// None where there is none.
pub(super) fn read(
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
