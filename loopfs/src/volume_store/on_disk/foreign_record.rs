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
pub(crate) const MAX_RECORD: usize = 240;

/// The finding of a search for one volume, which the condition of the volume reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ForeignRecord {
    /// The volume contains files that are charged to `other`.
    Holds(ForeignFinding),
    /// The volume is charged for files of volume `other`.
    Charged(ForeignFinding),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForeignFinding {
    names: u64,
    pub(crate) other: String,
    /// The path of one of the files, without control characters and truncated if it is too long.
    example: String,
}

impl ForeignFinding {
    pub(crate) fn new(names: u64, other: String, example: &Path) -> Self {
        let prefix = format!("charged names={names} other={} example=", other.replace(' ', "+"));
        let example = shortened(example, MAX_RECORD - prefix.len());
        Self { names, other, example }
    }

    /// Formats the finding. `example` comes last, because it may contain spaces.
    fn print(&self, what: &str) -> String {
        format!("{what} names={} other={} example={}", self.names, self.other.replace(' ', "+"), self.example)
    }

    fn parse(text: &str) -> Option<Self> {
        let (names, rest) = text.strip_prefix("names=")?.split_once(" other=")?;
        let (other, example) = rest.split_once(" example=")?;
        Some(Self { names: names.parse().ok()?, other: other.replace('+', " "), example: example.to_owned() })
    }
}

impl ForeignRecord {
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

    pub(crate) fn print(&self) -> String {
        match self {
            Self::Holds(finding) => finding.print("holds"),
            Self::Charged(finding) => finding.print("charged"),
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.split_once(' ')? {
            ("holds", rest) => ForeignFinding::parse(rest).map(Self::Holds),
            ("charged", rest) => ForeignFinding::parse(rest).map(Self::Charged),
            _ => None,
        }
    }

    pub(crate) fn condition(&self) -> Condition {
        match self {
            Self::Holds(ForeignFinding { names, other, example }) => Condition::abnormal(
                AbnormalReason::FilesInForeignProject,
                format!(
                    "{names} files or directories of this volume carry another project id than the volume, {example:?} for \
                     example: their space is charged to {other} and not to this volume; the owner changed their project id. \
                     `loopfs quota tag` on the volume's directory, or loopfs-provisioner with --repair-projects, puts them back"
                ),
            ),
            Self::Charged(ForeignFinding { names, other, example }) => Condition::abnormal(
                AbnormalReason::ChargedForForeignFiles,
                format!(
                    "{names} files or directories of volume {other}, {example:?} for example, carry the project id of this \
                     volume and use up its limit; their owner changed their project id. `loopfs quota tag` on the \
                     directory of volume {other}, or loopfs-provisioner with --repair-projects, puts them back"
                ),
            ),
        }
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
