//! The result of the last search for files in foreign projects, stored in an extended attribute of the volume's directory.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;

use crate::error::{Context, Result};
use crate::sys::xattr;
use crate::volume_store::condition::{AbnormalReason, Condition};

/// The attribute of a volume's directory that stores its [`ForeignRecord`].
const NAME: &CStr = c"trusted.loopfs.foreign";
/// The maximum length of a record in bytes, so that it usually fits into the inode.
const MAX_RECORD: usize = 240;

/// The finding of a search for one volume, which the condition of the volume reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForeignRecord {
    /// `true`: the volume contains files that are charged to `other`. `false`: it is charged for files of volume `other`.
    pub(crate) holds: bool,
    names: u64,
    pub(crate) other: String,
    /// The path of one of the files, without control characters and truncated if it is too long.
    example: String,
}

impl ForeignRecord {
    pub(crate) fn new(holds: bool, names: u64, other: String, example: &Path) -> Self {
        let mut record = Self { holds, names, other, example: String::new() };
        record.example = shortened(example, MAX_RECORD - record.print().len());
        record
    }

    /// Reads the record. Returns `None` if there is none, or if this version cannot parse it.
    pub(crate) fn read(directory: &OwnedFd) -> Result<Option<Self>> {
        let value = xattr::get(directory, NAME).context("read the attribute of", "a volume's directory")?;
        Ok(value.and_then(|value| Self::parse(&String::from_utf8_lossy(&value))))
    }

    pub(crate) fn write(record: Option<&Self>, directory: &OwnedFd) -> std::result::Result<(), Errno> {
        match record {
            Some(record) => xattr::set(directory, NAME, record.print().as_bytes()),
            None => xattr::remove(directory, NAME),
        }
    }

    /// Formats the record. `example` comes last, because it may contain spaces.
    fn print(&self) -> String {
        let what = if self.holds { "holds" } else { "charged" };
        let other = self.other.replace(' ', "+");
        format!("{what} names={} other={other} example={}", self.names, self.example)
    }

    fn parse(text: &str) -> Option<Self> {
        let (what, rest) = text.split_once(" names=")?;
        let (names, rest) = rest.split_once(" other=")?;
        let (other, example) = rest.split_once(" example=")?;
        let holds = match what {
            "holds" => true,
            "charged" => false,
            _ => return None,
        };
        Some(Self {
            holds,
            names: names.parse().ok()?,
            other: other.replace('+', " "),
            example: example.to_owned(),
        })
    }

    pub(crate) fn condition(&self) -> Condition {
        let Self { holds, names, other, example } = self;
        if *holds {
            return Condition::abnormal(
                AbnormalReason::FilesInForeignProject,
                format!(
                    "{names} files or directories of this volume carry another project id than the volume, {example:?} for \
                     example: their space is charged to {other} and not to this volume; the owner changed their project id. \
                     `loopfs quota tag` on the volume's directory, or loopfs-csi with --repair-projects, puts them back"
                ),
            );
        }
        Condition::abnormal(
            AbnormalReason::ChargedForForeignFiles,
            format!(
                "{names} files or directories of volume {other}, {example:?} for example, carry the project id of this volume \
                 and use up its limit; their owner changed their project id. `loopfs quota tag` on the directory of volume \
                 {other}, or loopfs-csi with --repair-projects, puts them back"
            ),
        )
    }
}

fn shortened(path: &Path, length: usize) -> String {
    let mut text: String =
        path.to_string_lossy().chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if text.len() > length {
        let mut end = length.saturating_sub(3);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_record_fits_and_reads_back(
            other in "((volume |snapshot |the deleted volume )?[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})|no volume",
            names: u64,
            example in "\\PC{0,300}|[\n\t a=]{0,20}",
            holds: bool,
        ) {
            let record = ForeignRecord::new(holds, names, other, Path::new(&example));
            let text = record.print();
            prop_assert!(text.len() <= MAX_RECORD, "{}", text.len());
            prop_assert_eq!(ForeignRecord::parse(&text), Some(record));
        }

        #[test]
        fn any_text_is_parsed_without_panic(text in "(holds |charged |names=|other=|example=|[0-9]{0,22}|\\PC){0,8}") {
            ForeignRecord::parse(&text);
        }
    }
}
