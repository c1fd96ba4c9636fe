//! What the creator of a volume noted about it, in two extended attributes of its directory or image.
//!
//! Both are written before the volume has its name, so they appear with the volume, need no fsync of their own, and go to the trash with
//! it. Copies do not inherit them.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::attribute;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::xattr;
use crate::volume_store::source::ContentSource;

const ANNOTATIONS: &CStr = c"trusted.loopfs.annotations";
const PENDING: &CStr = c"trusted.loopfs.pending";

/// Notes of the creator of a volume: texts by their keys, which mean nothing to the store. For example, they say for whom the volume was
/// created, if everything but the disk is lost. They are fixed at creation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Annotations(BTreeMap<String, String>);

impl Annotations {
    /// The maximum length in bytes of all entries, as `key=value` with a space between them.
    pub const MAX_LENGTH: usize = 1024;

    /// Returns annotations with these keys and values.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: a key is empty or contains something other than `a-z 0-9 -`; a value contains something other than
    /// printable ASCII without spaces; together they are longer than [`MAX_LENGTH`](Self::MAX_LENGTH).
    pub fn new<K: Into<String>, V: Into<String>>(entries: impl IntoIterator<Item = (K, V)>) -> Result<Self> {
        let mut annotations = BTreeMap::new();
        for (key, value) in entries {
            let (key, value) = (key.into(), value.into());
            if let Some(detail) = invalid_in(&key, &value) {
                return Err(Error::new(ErrorKind::InvalidInput, "annotate with", format!("{key:?}"), detail));
            }
            annotations.insert(key, value);
        }
        let annotations = Self(annotations);
        let length = annotations.print().len();
        if length > Self::MAX_LENGTH {
            let detail = format!("{length} bytes, at most {} are allowed", Self::MAX_LENGTH);
            return Err(Error::new(ErrorKind::InvalidInput, "annotate with", "all keys and values", detail));
        }
        Ok(annotations)
    }

    /// Returns the value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Returns keys and values, in the order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Writes the annotations, and whether the volume is pending, to a directory or image that has no name yet.
    pub(crate) fn write(&self, made: impl AsFd, pending: bool, entry: ContentSource<'_>) -> Result<()> {
        let made = made.as_fd();
        if !self.0.is_empty() {
            xattr::set(made, ANNOTATIONS, self.print().as_bytes()).context("annotate", entry)?;
        }
        if pending {
            xattr::set(made, PENDING, b"yes").context("annotate", entry)?;
        }
        Ok(())
    }

    /// Reads the annotations. A volume that was created without some has none.
    pub(crate) fn read(made: impl AsFd) -> Result<Self> {
        let read = attribute::read(made, ANNOTATIONS, "read the annotations of", "a volume", Self::parse);
        read.map(Option::unwrap_or_default)
    }

    fn print(&self) -> String {
        let fields: Vec<String> = self.0.iter().map(|(key, value)| format!("{key}={value}")).collect();
        fields.join(" ")
    }

    fn parse(text: &str) -> Option<Self> {
        if text.len() > Self::MAX_LENGTH {
            return None;
        }
        let field = |field: &str| {
            let (key, value) = field.split_once('=')?;
            invalid_in(key, value).is_none().then(|| (key.to_owned(), value.to_owned()))
        };
        text.split(' ').map(field).collect::<Option<_>>().map(Self)
    }
}

/// Returns what is wrong with a key or its value.
fn invalid_in(key: &str, value: &str) -> Option<&'static str> {
    let is_key = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if key.is_empty() || !key.chars().all(is_key) {
        return Some("the key is empty or contains something other than a-z 0-9 -");
    }
    let is_printable = |c: char| c.is_ascii_graphic();
    (!value.chars().all(is_printable))
        .then_some("its value contains something other than printable ASCII without spaces")
}

/// Returns `true` if the volume was created as pending and not confirmed since.
pub(crate) fn is_pending(made: impl AsFd) -> Result<bool> {
    attribute::is_set(made, PENDING, "a volume")
}

/// Ends the pending state of a volume. Succeeds if it has ended.
pub(crate) fn remove_pending(made: impl AsFd) -> Result<(), Errno> {
    xattr::remove(made, PENDING)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::no_key("", "a")]
    #[case::key_with_a_sign("a=b", "a")]
    #[case::key_with_a_capital("Name", "a")]
    #[case::value_with_a_space("name", "a b")]
    #[case::value_with_a_line_break("name", "a\nb")]
    #[case::value_with_a_nul("name", "a\0")]
    #[case::value_with_a_format_character("name", "a\u{202e}b")]
    #[case::too_long("name", &"a".repeat(Annotations::MAX_LENGTH - 4))]
    fn invalid_annotations_are_rejected(#[case] key: &str, #[case] value: &str) {
        let error = Annotations::new([(key, value)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }

    #[test]
    fn the_longest_annotations_are_accepted() {
        Annotations::new([("name", "a".repeat(Annotations::MAX_LENGTH - 5))]).unwrap();
    }

    proptest! {
        #[test]
        fn annotations_read_back_as_printed(
            fields in prop::collection::btree_map("[a-z0-9-]{1,9}", "[!-~]{0,20}", 1..8),
        ) {
            let annotations = Annotations::new(fields.clone()).unwrap();
            prop_assert_eq!(Annotations::parse(&annotations.print()), Some(annotations.clone()));
            for (key, value) in &fields {
                prop_assert_eq!(annotations.get(key), Some(value.as_str()));
            }
            prop_assert_eq!(annotations.iter().count(), fields.len());
        }

        #[test]
        fn parsing_any_text_gives_valid_annotations(text in "([a-z]{0,3}=?[a-z=]{0,3}| |\\PC){0,8}") {
            if let Some(annotations) = Annotations::parse(&text) {
                prop_assert_eq!(Annotations::new(annotations.iter()).unwrap(), annotations);
            }
        }
    }
}
