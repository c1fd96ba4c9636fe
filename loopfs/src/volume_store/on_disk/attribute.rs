//! Extended attributes that contain text: how the store reads and parses them.

use std::ffi::CStr;
use std::fmt::Display;
use std::os::fd::AsFd;

use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::xattr;

/// Reads an attribute and parses its text. Returns `None` if the attribute is not set.
///
/// # Errors
/// [`ErrorKind::Other`]: `parse` returned `None`. The errors of fgetxattr(2). Both name `operation` and `object`.
pub(crate) fn read<T>(
    file: impl AsFd,
    name: &CStr,
    operation: &'static str,
    object: impl Display,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>> {
    let Some(value) = xattr::get(file, name).context(operation, &object)? else { return Ok(None) };
    let text = String::from_utf8_lossy(&value);
    parse(&text).map(Some).ok_or_else(|| {
        let detail =
            format!("{text:?} in the extended attribute {name:?} is invalid, or a later version wrote it");
        Error::new(ErrorKind::Other, operation, object, detail)
    })
}

/// Returns `true` if an attribute is set, whatever its value. An error names `object`.
pub(super) fn is_set(file: impl AsFd, name: &CStr, object: &'static str) -> Result<bool> {
    Ok(xattr::get(file, name).context("read the attributes of", object)?.is_some())
}

/// As [`read`], of an attribute that each image and directory of the store has.
///
/// # Errors
/// [`ErrorKind::Damaged`]: the attribute is not set.
pub(crate) fn require<T>(
    file: impl AsFd,
    name: &CStr,
    operation: &'static str,
    object: impl Display,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T> {
    read(file, name, operation, &object, parse)?.ok_or_else(|| {
        let cause = format!("it lacks the extended attribute {name:?}");
        Error::new(ErrorKind::Damaged, operation, object, cause).with_remedy(
            "restore it with its attributes (rsync -X, cp --preserve=xattr), or delete the volume",
        )
    })
}

/// Returns the value of a key in fields of the form `key=value` that are separated by spaces.
pub(super) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.split(' ').find_map(|field| field.strip_prefix(key)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_matches_its_whole_key() {
        let text = "bytes-per-inode=2048 bytes=7 empty=";
        assert_eq!(field(text, "bytes"), Some("7"));
        assert_eq!(field(text, "bytes-per-inode"), Some("2048"));
        assert_eq!(field(text, "empty"), Some(""));
        assert_eq!(field(text, "inode"), None);
    }
}
