//! Types for quantities. Only this module rounds or multiplies by a block size.

use std::fmt;

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A number of inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Inodes(pub u64);

/// The unit of volume sizes in bytes. XFS enforces quotas in units of its blocks. Images use the same unit, so that both
/// kinds of volume round alike. 4096 is also the largest sector size in common use.
const ALLOCATION_UNIT: u64 = 4096;

/// `struct fs_disk_quota` counts space in units of 512 bytes.
const BASIC_BLOCK: u64 = 512;

/// The largest size that can be rounded up, because file offsets are signed.
const LARGEST: u64 = i64::MAX as u64 - (ALLOCATION_UNIT - 1);

impl Bytes {
    /// 1 KiB.
    pub const KIB: Self = Self(1 << 10);
    /// 1 MiB.
    pub const MIB: Self = Self(1 << 20);
    /// 1 GiB.
    pub const GIB: Self = Self(1 << 30);

    /// Rounds up to a multiple of 4096 bytes. Returns `None` if the result exceeds the largest file offset.
    #[must_use]
    pub fn round_up(self) -> Option<Self> {
        (self.0 <= LARGEST).then(|| Self(self.0.next_multiple_of(ALLOCATION_UNIT)))
    }

    /// Returns `self - other`, or zero if `other` is larger.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Returns `self + other`, or the largest number if the sum overflows.
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    pub(crate) fn to_basic_blocks(self) -> u64 {
        self.0.div_ceil(BASIC_BLOCK)
    }

    pub(crate) fn from_basic_blocks(blocks: u64) -> Self {
        Self(blocks.saturating_mul(BASIC_BLOCK))
    }
}

impl fmt::Display for Bytes {
    /// Writes the exact number, and a larger unit in brackets: `1048576 bytes (1 MiB)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0)?;
        let units = [(Self::GIB, "GiB"), (Self::MIB, "MiB"), (Self::KIB, "KiB")];
        match units.iter().find(|(unit, _)| self.0 >= unit.0) {
            Some((unit, name)) if self.0.is_multiple_of(unit.0) => write!(f, " ({} {name})", self.0 / unit.0),
            Some((unit, name)) => write!(f, " ({:.1} {name})", self.0 as f64 / unit.0 as f64),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Inodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} inodes", self.0)
    }
}

/// The number of a block device, `dev_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// The number of the driver.
    pub major: u32,
    /// The number of the device among those of the driver.
    pub minor: u32,
}

impl DeviceNumber {
    pub(crate) fn from_raw(raw: u64) -> Self {
        Self { major: nix::sys::stat::major(raw) as u32, minor: nix::sys::stat::minor(raw) as u32 }
    }

    /// Returns the number as a `dev_t`, as stat(2) returns it.
    #[must_use]
    pub fn to_raw(self) -> u64 {
        nix::sys::stat::makedev(self.major.into(), self.minor.into())
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl std::str::FromStr for DeviceNumber {
    type Err = std::num::ParseIntError;

    /// Parses `major:minor`, the format of sysfs and `/proc/self/mountinfo`.
    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let (major, minor) = text.split_once(':').unwrap_or((text, ""));
        Ok(Self { major: major.parse()?, minor: minor.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_up_returns_the_next_multiple_of_the_unit(size in 0..=LARGEST) {
            let rounded = Bytes(size).round_up().unwrap().0;
            prop_assert!(rounded >= size && rounded - size < ALLOCATION_UNIT);
            prop_assert_eq!(rounded % ALLOCATION_UNIT, 0);
            prop_assert!(i64::try_from(rounded).is_ok());
        }

        #[test]
        fn basic_blocks_hold_at_least_the_size(size in 0..=LARGEST) {
            prop_assert!(Bytes::from_basic_blocks(Bytes(size).to_basic_blocks()) >= Bytes(size));
        }

        #[test]
        fn round_up_returns_none_for_a_size_that_is_too_large(size in LARGEST + 1..=u64::MAX) {
            prop_assert_eq!(Bytes(size).round_up(), None);
        }
    }

    #[test]
    fn bytes_are_printed_exactly_and_in_a_larger_unit() {
        assert_eq!(Bytes(512).to_string(), "512 bytes");
        assert_eq!(Bytes::MIB.to_string(), "1048576 bytes (1 MiB)");
        assert_eq!(Bytes(1_234_567).to_string(), "1234567 bytes (1.2 MiB)");
    }

    #[test]
    fn device_numbers_parse_and_print() {
        assert_eq!("7:65536".parse(), Ok(DeviceNumber { major: 7, minor: 65536 }));
        assert_eq!(DeviceNumber { major: 7, minor: 3 }.to_string(), "7:3");
        assert!("7".parse::<DeviceNumber>().is_err());
    }
}
