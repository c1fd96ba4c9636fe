//! Quantities with a type. The only place that rounds or multiplies by a block size.

use std::fmt;

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A number of inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Inodes(pub u64);

/// XFS counts quota in its blocks and refuses nothing finer; images keep the same step so that
/// both kinds of volume round alike. 4096 is also the largest sector size in common use.
const ALLOCATION_UNIT: u64 = 4096;

/// `struct fs_disk_quota` counts space in units of 512 bytes.
const BASIC_BLOCK: u64 = 512;

/// File offsets are signed.
const LARGEST: u64 = i64::MAX as u64 - (ALLOCATION_UNIT - 1);

impl Bytes {
    /// 1 KiB.
    pub const KIB: Self = Self(1 << 10);
    /// 1 MiB.
    pub const MIB: Self = Self(1 << 20);
    /// 1 GiB.
    pub const GIB: Self = Self(1 << 30);

    /// This many bytes or the few more that make a whole number of 4096-byte units. None where
    /// that is more than a file offset can say.
    #[must_use]
    pub fn round_up(self) -> Option<Self> {
        (self.0 <= LARGEST).then(|| Self(self.0.next_multiple_of(ALLOCATION_UNIT)))
    }

    /// `self - other`, or zero.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `self + other`, or the largest number.
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
    /// Exact, and readable where that costs nothing: `1048576 bytes (1 MiB)`.
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

/// A block device's number, `dev_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// Which driver.
    pub major: u32,
    /// Which device of that driver.
    pub minor: u32,
}

impl DeviceNumber {
    pub(crate) fn from_raw(raw: u64) -> Self {
        Self { major: nix::sys::stat::major(raw) as u32, minor: nix::sys::stat::minor(raw) as u32 }
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl std::str::FromStr for DeviceNumber {
    type Err = std::num::ParseIntError;

    /// `major:minor`, as in sysfs and `/proc/self/mountinfo`.
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
        fn rounding_never_gives_less_than_asked(asked in 0..=LARGEST) {
            let rounded = Bytes(asked).round_up().unwrap().0;
            prop_assert!(rounded >= asked && rounded - asked < ALLOCATION_UNIT);
            prop_assert_eq!(rounded % ALLOCATION_UNIT, 0);
            prop_assert!(i64::try_from(rounded).is_ok());
        }

        #[test]
        fn basic_blocks_never_lose_a_byte(asked in 0..=LARGEST) {
            prop_assert!(Bytes::from_basic_blocks(Bytes(asked).to_basic_blocks()) >= Bytes(asked));
        }

        #[test]
        fn too_large_is_refused_not_wrapped(asked in LARGEST + 1..=u64::MAX) {
            prop_assert_eq!(Bytes(asked).round_up(), None);
        }
    }

    #[test]
    fn bytes_read_as_people_write_them() {
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
