//! Sizes in text form. Units are powers of 1024. The parser rejects units that could mean powers of 1000.

use std::str::FromStr;

/// Units with their binary exponents, the smallest first.
const UNITS: [(&str, u32); 7] =
    [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("PiB", 50), ("EiB", 60)];

/// Parses a number that consists of digits only. `str::parse` would accept a sign too.
pub(crate) fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Parses sizes such as `4096`, `4096B` or `4MiB`: digits and at most one unit, without sign, space or fraction.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err("write a number of bytes, or one with a unit as in 4MiB".to_owned());
    }
    let shift = match unit {
        "" => 0,
        unit => UNITS.iter().find(|(name, _)| *name == unit).map(|(_, shift)| *shift).ok_or_else(|| {
            format!(
                "{unit:?} is not a unit: write {number}KiB, {number}MiB, {number}GiB and so on, or plain bytes"
            )
        })?,
    };
    let value = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    value.ok_or_else(|| "the number of bytes does not fit in 64 bits".to_owned())
}

/// Parses a size that is a limit.
pub(crate) fn nonzero(text: &str) -> Result<u64, String> {
    parse(text).and_then(limit)
}

/// Parses a number that is a limit.
pub(crate) fn nonzero_number(text: &str) -> Result<u64, String> {
    number(text).ok_or_else(|| "write a plain number".to_owned()).and_then(limit)
}

fn limit(number: u64) -> Result<u64, String> {
    // The kernel interprets 0 as no limit.
    if number == 0 {
        Err("0 cannot be a limit; write `unlimited` if that is meant".to_owned())
    } else {
        Ok(number)
    }
}

/// Formats a size in its largest unit. `4MiB` is exact; a size with a fraction, such as `1.2MiB`, is rounded.
pub(crate) fn show(bytes: u64) -> String {
    let unit = UNITS.iter().rposition(|(_, shift)| bytes >> shift > 0).unwrap_or_default();
    let (name, shift) = UNITS[unit];
    if bytes.is_multiple_of(1 << shift) {
        return format!("{}{name}", bytes >> shift);
    }
    let tenths = |shift: u32| (u128::from(bytes) * 10 + (1 << shift) / 2) >> shift;
    // 1023.97KiB is rounded to 1.0MiB.
    let (name, shift) = match UNITS.get(unit + 1) {
        Some(larger) if tenths(shift) >= 10 * 1024 => *larger,
        _ => (name, shift),
    };
    format!("{}.{}{name}", tenths(shift) / 10, tenths(shift) % 10)
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
        assert_eq!(parse(text), Ok(bytes));
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
        assert!(parse(text).is_err());
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
        assert_eq!(show(bytes), text);
    }

    proptest! {
        #[test]
        fn a_size_formatted_without_a_fraction_is_exact(bytes: u64, shift in 0..64u32) {
            let bytes = bytes >> shift;
            let shown = show(bytes);
            prop_assert!(shown.len() <= "1023.9KiB".len(), "{}", shown);
            if !shown.contains('.') {
                prop_assert_eq!(parse(&shown), Ok(bytes));
            }
        }

        #[test]
        fn any_text_is_parsed_or_rejected_without_panic(text in "\\PC{0,30}") {
            if let Ok(bytes) = parse(&text) {
                prop_assert_eq!(parse(&bytes.to_string()), Ok(bytes));
            }
        }
    }
}
