//! What the last search for files in foreign projects found of a volume, in an extended attribute of its directory.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;

use crate::error::{Context, Result};
use crate::sys::xattr;
use crate::volume_store::condition::{AbnormalReason, Condition};

/// On the directory of a volume, see [`ForeignRecord`].
const NAME: &CStr = c"trusted.loopfs.foreign";
/// The longest value of an attribute that the store reads is 256 bytes.
pub(crate) const MAX_RECORD: usize = 240;

/// What a search found of a volume, as the condition of the volume reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ForeignRecord {
    /// It holds files that are charged to `other`.
    Holds(ForeignFinding),
    /// It is charged for files that volume `other` holds.
    Charged(ForeignFinding),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForeignFinding {
    names: u64,
    pub(crate) other: String,
    /// Without control characters, and cut where it would be too long.
    example: String,
}

impl ForeignFinding {
    pub(crate) fn new(names: u64, other: String, example: &Path) -> Self {
        let prefix = format!("charged names={names} other={} example=", other.replace(' ', "+"));
        let example = shortened(example, MAX_RECORD - prefix.len());
        Self { names, other, example }
    }

    /// The field that may hold spaces comes last.
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
    /// None where nothing is recorded, or nothing that this version understands.
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
