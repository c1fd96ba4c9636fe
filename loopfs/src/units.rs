//! Types for quantities. Only this module rounds or multiplies by a block size.

use std::fmt;
use std::str::FromStr;

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

    fn fmt_short(self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = self;
        let unit = UNITS.iter().rposition(|(_, shift)| bytes >> shift > 0).unwrap_or_default();
        let (name, shift) = UNITS[unit];
        if bytes.is_multiple_of(1 << shift) {
            return write!(f, "{}{name}", bytes >> shift);
        }
        let tenths = |shift: u32| (u128::from(bytes) * 10 + (1 << shift) / 2) >> shift;
        // 1023.97KiB is rounded to 1.0MiB.
        let (name, shift) = match UNITS.get(unit + 1) {
            Some(larger) if tenths(shift) >= 10 * 1024 => *larger,
            _ => (name, shift),
        };
        write!(f, "{}.{}{name}", tenths(shift) / 10, tenths(shift) % 10)
    }

    pub(crate) fn to_basic_blocks(self) -> u64 {
        self.0.div_ceil(BASIC_BLOCK)
    }

    pub(crate) fn from_basic_blocks(blocks: u64) -> Self {
        Self(blocks.saturating_mul(BASIC_BLOCK))
    }
}

/// Units with their binary exponents, the smallest first.
const UNITS: [(&str, u32); 7] =
    [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("PiB", 50), ("EiB", 60)];

/// Why a text is no number of bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseBytesError {
    /// The text does not begin with a digit.
    #[error("write a number of bytes, or one with a unit as in 4MiB")]
    NoNumber,
    /// The text after the digits is none of the units.
    #[error("{unit:?} is not a unit: write {number}KiB, {number}MiB, {number}GiB and so on, or plain bytes")]
    Unit {
        /// The digits.
        number: String,
        /// The text after them.
        unit: String,
    },
    /// The number is too large.
    #[error("the number of bytes does not fit in 64 bits")]
    TooLarge,
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    /// Parses sizes such as `4096`, `4096B` or `4MiB`: digits and at most one unit, without sign, space or fraction. Units are powers of
    /// 1024, and those that could mean powers of 1000 are rejected.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        if number.is_empty() {
            return Err(ParseBytesError::NoNumber);
        }
        let known = UNITS.iter().find(|(name, _)| *name == unit || (unit.is_empty() && *name == "B"));
        let Some((_, shift)) = known else {
            return Err(ParseBytesError::Unit { number: number.to_owned(), unit: unit.to_owned() });
        };
        let value = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
        value.map(Self).ok_or(ParseBytesError::TooLarge)
    }
}

impl From<u64> for Bytes {
    fn from(bytes: u64) -> Self {
        Self(bytes)
    }
}

impl From<Bytes> for u64 {
    fn from(bytes: Bytes) -> Self {
        bytes.0
    }
}

impl fmt::Display for Bytes {
    /// Writes the exact number, and a larger unit in brackets: `1048576 bytes (1 MiB)`. With `#`, writes the size in its largest unit:
    /// `4MiB` is exact; a size with a fraction, such as `1.2MiB`, is rounded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return self.fmt_short(f);
        }
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
    /// Returns the number of a `dev_t`, as stat(2) returns it.
    #[must_use]
    pub fn from_raw(raw: u64) -> Self {
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

impl FromStr for DeviceNumber {
    type Err = std::num::ParseIntError;

    /// Parses `major:minor`, the format of sysfs and `/proc/self/mountinfo`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (major, minor) = text.split_once(':').unwrap_or((text, ""));
        Ok(Self { major: major.parse()?, minor: minor.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("0", 0)]
    #[case("4096", 4096)]
    #[case("512B", 512)]
    #[case("4KiB", 4096)]
    #[case("4MiB", 4 << 20)]
    #[case("1GiB", 1 << 30)]
    #[case("15EiB", 15 << 60)]
    #[case("18446744073709551615", u64::MAX)]
    fn valid_sizes_are_parsed(#[case] text: &str, #[case] bytes: u64) {
        assert_eq!(text.parse(), Ok(Bytes(bytes)));
    }

    #[rstest]
    #[case::nothing("")]
    #[case::no_number("MiB")]
    #[case::sign("-1")]
    #[case::plus("+1")]
    #[case::space("4 MiB")]
    #[case::fraction("1.5GiB")]
    #[case::letter("4M")]
    #[case::power_of_ten("4MB")]
    #[case::case("4mib")]
    #[case::separator("1_000")]
    #[case::hexadecimal("0x10")]
    #[case::more("4MiB4")]
    #[case::other_digits("٤")]
    #[case::number_too_large("18446744073709551616")]
    #[case::product_too_large("16EiB")]
    fn invalid_sizes_are_rejected(#[case] text: &str) {
        assert!(text.parse::<Bytes>().is_err());
    }

    #[rstest]
    #[case(0, "0B")]
    #[case(1023, "1023B")]
    #[case(1024, "1KiB")]
    #[case(1_234_567, "1.2MiB")]
    #[case(4 << 20, "4MiB")]
    #[case(1 << 20 | 1, "1.0MiB")]
    #[case((1 << 20) - 1, "1.0MiB")]
    #[case((1 << 30) - 1, "1.0GiB")]
    #[case(1536 << 20, "1.5GiB")]
    #[case(u64::MAX, "16.0EiB")]
    fn sizes_are_formatted(#[case] bytes: u64, #[case] text: &str) {
        assert_eq!(format!("{:#}", Bytes(bytes)), text);
    }

    proptest! {
        #[test]
        fn sizes_without_fractions_are_exact(bytes: u64, shift in 0..64u32) {
            let bytes = Bytes(bytes >> shift);
            let shown = format!("{bytes:#}");
            prop_assert!(shown.len() <= "1023.9KiB".len(), "{}", shown);
            if !shown.contains('.') {
                prop_assert_eq!(shown.parse(), Ok(bytes));
            }
        }

        #[test]
        fn any_text_is_parsed_or_rejected(text in "\\PC{0,30}") {
            if let Ok(Bytes(bytes)) = text.parse() {
                prop_assert_eq!(bytes.to_string().parse(), Ok(Bytes(bytes)));
            }
        }

        #[test]
        fn round_up_returns_the_next_multiple(size in 0..=LARGEST) {
            let rounded = Bytes(size).round_up().unwrap().0;
            prop_assert!(rounded >= size && rounded - size < ALLOCATION_UNIT);
            prop_assert_eq!(rounded % ALLOCATION_UNIT, 0);
            prop_assert!(i64::try_from(rounded).is_ok());
        }

        #[test]
        fn basic_blocks_hold_the_size(size in 0..=LARGEST) {
            prop_assert!(Bytes::from_basic_blocks(Bytes(size).to_basic_blocks()) >= Bytes(size));
        }

        #[test]
        fn rounding_up_huge_sizes_returns_none(size in LARGEST + 1..=u64::MAX) {
            prop_assert_eq!(Bytes(size).round_up(), None);
        }
    }

    #[test]
    fn bytes_print_exactly_and_rounded() {
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
