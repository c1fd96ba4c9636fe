//! Identities of attachments, which can be stored and compared.

use std::fmt;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::str::FromStr;

use nix::sys::stat::fstat;

use crate::error::{Context, Error, ErrorKind, Result};
use crate::units::DeviceNumber;

/// The access of a device or descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads and writes.
    ReadWrite,
    /// Reads only; the kernel refuses writes at the block layer.
    ReadOnly,
}

/// The identity of the file that a loop device is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackingFile {
    /// `st_dev` of the file.
    pub device: DeviceNumber,
    /// `st_ino` of the file.
    pub inode: u64,
}

impl BackingFile {
    /// Returns the identity of an open file.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn of(file: impl AsFd) -> Result<Self> {
        let status = fstat(file.as_fd()).context("fstat", "the backing file")?;
        Ok(Self { device: DeviceNumber::from_raw(status.st_dev), inode: status.st_ino })
    }
}

impl fmt::Display for BackingFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inode {} on device {}", self.inode, self.device)
    }
}

/// The part of a file that a device maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BackingRange {
    /// Where the device begins in the file, in bytes.
    pub offset: u64,
    /// The size limit of the device; `None` maps the rest of the file.
    pub size_limit: Option<NonZeroU64>,
}

/// One attachment of a file to a device. It identifies the attachment, not the device: if the index is bound again, that is
/// another binding. Its text form ([`Display`](fmt::Display) and [`FromStr`]) can
/// be stored; [`LoopDevice::open_binding`](super::LoopDevice::open_binding) fails for a stale one.
///
/// On a kernel without `BLKGETDISKSEQ` (before Linux 5.15), a file that was detached and attached to the same index again counts as
/// the same attachment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// N of `/dev/loopN`.
    pub index: u32,
    /// `BLKGETDISKSEQ` (Linux 5.15): differs for each attachment since boot.
    pub disk_sequence: Option<NonZeroU64>,
    /// The file.
    pub backing: BackingFile,
    /// The mapped part of the file.
    pub range: BackingRange,
    /// Whether writes are refused.
    pub access: Access,
}

impl Binding {
    /// Returns `true` if both are the same attachment. If both have a sequence number, only that and the index are compared: any
    /// process that may open the device for writing can change its range.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        if self.disk_sequence.is_some() && other.disk_sequence.is_some() {
            return (self.index, self.disk_sequence) == (other.index, other.disk_sequence);
        }
        let Self { index, disk_sequence: _, backing, range, access } = self;
        (*index, *backing, *range, *access) == (other.index, other.backing, other.range, other.access)
    }
}

impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: Option<NonZeroU64>| value.map_or(0, NonZeroU64::get);
        let access = match self.access {
            Access::ReadWrite => "rw",
            Access::ReadOnly => "ro",
        };
        write!(
            f,
            "loop{} seq={} dev={} ino={} offset={} limit={} {access}",
            self.index,
            number(self.disk_sequence),
            self.backing.device,
            self.backing.inode,
            self.range.offset,
            number(self.range.size_limit),
        )
    }
}

impl FromStr for Binding {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse(text).ok_or_else(|| {
            let shown: String = text.chars().take(160).collect();
            Error::new(
                ErrorKind::InvalidInput,
                "read binding",
                format!("{shown:?}"),
                "this is not the text of a binding",
            )
        })
    }
}

fn parse(text: &str) -> Option<Binding> {
    let mut fields = text.split(' ');
    let mut field = |key: &str| fields.next()?.strip_prefix(key);
    let binding = Binding {
        index: field("loop")?.parse().ok()?,
        disk_sequence: NonZeroU64::new(field("seq=")?.parse().ok()?),
        backing: BackingFile { device: field("dev=")?.parse().ok()?, inode: field("ino=")?.parse().ok()? },
        range: BackingRange {
            offset: field("offset=")?.parse().ok()?,
            size_limit: NonZeroU64::new(field("limit=")?.parse().ok()?),
        },
        access: match field("")? {
            "rw" => Access::ReadWrite,
            "ro" => Access::ReadOnly,
            _ => return None,
        },
    };
    fields.next().is_none().then_some(binding)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bindings() -> impl Strategy<Value = Binding> {
        let access = prop_oneof![Just(Access::ReadWrite), Just(Access::ReadOnly)];
        (
            any::<u32>(),
            any::<u64>(),
            any::<u32>(),
            any::<u32>(),
            any::<u64>(),
            any::<u64>(),
            any::<u64>(),
            access,
        )
            .prop_map(|(index, sequence, major, minor, inode, offset, limit, access)| Binding {
                index,
                disk_sequence: NonZeroU64::new(sequence),
                backing: BackingFile { device: DeviceNumber { major, minor }, inode },
                range: BackingRange { offset, size_limit: NonZeroU64::new(limit) },
                access,
            })
    }

    proptest! {
        #[test]
        fn a_binding_reads_back_as_printed(binding in bindings()) {
            prop_assert_eq!(binding.to_string().parse::<Binding>().unwrap(), binding);
        }

        #[test]
        fn any_text_is_parsed_or_rejected(text in "(loop[0-9]{1,12} )?(seq=[0-9]* )?\\PC{0,60}") {
            if let Ok(binding) = text.parse::<Binding>() {
                prop_assert_eq!(binding.to_string().parse::<Binding>().unwrap(), binding);
            }
        }

        #[test]
        fn another_sequence_number_is_another_attachment(binding in bindings(), sequence in 1..u64::MAX) {
            let other = Binding { disk_sequence: NonZeroU64::new(sequence), ..binding.clone() };
            let comparable = binding.disk_sequence.is_some();
            prop_assert_eq!(binding.is_same(&other), !comparable || binding == other);
            let changed = BackingRange { offset: !binding.range.offset, ..binding.range };
            let changed = Binding { range: changed, ..binding.clone() };
            prop_assert_eq!(binding.is_same(&changed), comparable);
            let unknown = Binding { disk_sequence: None, ..binding.clone() };
            prop_assert!(binding.is_same(&unknown) && unknown.is_same(&binding));
        }

        #[test]
        fn another_file_is_another_attachment(binding in bindings(), inode: u64) {
            let backing = BackingFile { inode, ..binding.backing };
            let other = Binding { backing, disk_sequence: None, ..binding.clone() };
            prop_assert_eq!(binding.is_same(&other), inode == binding.backing.inode);
        }
    }
}
