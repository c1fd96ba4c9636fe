//! Converts Kubernetes quantities ("4Mi", "1.5e3", "500m") to whole bytes and back.
//!
//! Published crates for this compute in floating point, or in a fixed decimal type that panics on overflow. A claim is untrusted
//! input, so neither is suitable. The grammar is that of apimachinery's `resource.Quantity`. Rounding is upwards, so a volume is
//! never smaller than requested.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use loopfs::Bytes;

/// The reason why a quantity is not a number of bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum QuantityError {
    /// The text does not follow the grammar.
    #[error("{0:?} is not a quantity; write a number with an optional suffix, as in 4Mi or 10G")]
    Malformed(String),
    /// A size below zero.
    #[error("{0:?} is below zero")]
    Negative(String),
    /// More than 2^63-1 bytes, the most that Kubernetes and the kernel can count.
    #[error("{0:?} is more than 8Ei - 1")]
    TooLarge(String),
}

/// The largest size Kubernetes itself can express, in bytes.
const MAX_BYTES: u128 = i64::MAX as u128;

/// Number of fractional digits that count in a number with a binary suffix. The rest is rounded up. apimachinery keeps nine.
const FRACTION_DIGITS: u16 = 18;

/// Parses a quantity into bytes, rounding fractions of a byte up.
///
/// # Errors
/// See [`QuantityError`].
pub(crate) fn parse(quantity: &Quantity) -> Result<Bytes, QuantityError> {
    let text = quantity.0.as_str();
    let malformed = || QuantityError::Malformed(text.to_owned());
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let number = Number::split(unsigned).ok_or_else(malformed)?;
    let scale = Scale::parse(number.suffix).ok_or_else(malformed)?;
    if number.is_zero() {
        return Ok(Bytes(0));
    }
    if negative {
        return Err(QuantityError::Negative(text.to_owned()));
    }
    let bytes = match scale {
        Scale::Decimal(exponent) => number.times_power_of_ten(exponent),
        Scale::Binary(shift) => number.times_power_of_two(shift),
    };
    match bytes {
        Some(bytes) if bytes <= MAX_BYTES => {
            u64::try_from(bytes).map(Bytes).map_err(|_out_of_range| QuantityError::TooLarge(text.to_owned()))
        }
        _ => Err(QuantityError::TooLarge(text.to_owned())),
    }
}

/// Formats bytes with the largest binary suffix that divides them, as `kubectl` does.
pub(crate) fn format(bytes: Bytes) -> Quantity {
    const SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut value = bytes.0;
    let mut suffix = 0;
    while value != 0 && value.is_multiple_of(1024) && suffix + 1 < SUFFIXES.len() {
        value /= 1024;
        suffix += 1;
    }
    Quantity(format!("{value}{}", SUFFIXES[suffix]))
}

/// An unsigned decimal number and the text behind it.
struct Number<'a> {
    integer: &'a str,
    fraction: &'a str,
    suffix: &'a str,
}

impl<'a> Number<'a> {
    fn split(text: &'a str) -> Option<Self> {
        let (integer, rest) = split_digits(text);
        let (fraction, suffix) = match rest.strip_prefix('.') {
            Some(rest) => split_digits(rest),
            None => ("", rest),
        };
        if integer.is_empty() && fraction.is_empty() {
            return None;
        }
        Some(Number {
            integer: integer.trim_start_matches('0'),
            fraction: fraction.trim_end_matches('0'),
            suffix,
        })
    }

    fn is_zero(&self) -> bool {
        self.integer.is_empty() && self.fraction.is_empty()
    }

    /// Returns the number times 10^`exponent`, rounded up, or `None` if it needs more than 20 digits: 2^64 has 20.
    fn times_power_of_ten(&self, exponent: i32) -> Option<u128> {
        const MOST_DIGITS: i64 = 20;
        // The position of the decimal point, counted from the first digit of the integer part.
        let point = i64::try_from(self.integer.len()).ok()? + i64::from(exponent);
        let mut value: u128 = 0;
        let mut dropped = false;
        let mut position: i64 = 0;
        for digit in self.integer.bytes().chain(self.fraction.bytes()) {
            if position < point {
                value = value.checked_mul(10)?.checked_add(u128::from(digit - b'0'))?;
            } else {
                dropped |= digit != b'0';
            }
            position += 1;
        }
        if value != 0 {
            let zeros = (point - position).max(0);
            if zeros > MOST_DIGITS {
                return None;
            }
            value = value.checked_mul(10u128.checked_pow(u32::try_from(zeros).ok()?)?)?;
        }
        value.checked_add(u128::from(dropped))
    }

    /// Returns the number times 2^`shift`, rounded up.
    fn times_power_of_two(&self, shift: u32) -> Option<u128> {
        let integer = Number { fraction: "", ..*self }.times_power_of_ten(0)?;
        let fraction = Number { integer: "", ..*self }.times_power_of_ten(FRACTION_DIGITS.into())?;
        let unit = 10u128.pow(FRACTION_DIGITS.into());
        integer.checked_mul(1 << shift)?.checked_add((fraction << shift).div_ceil(unit))
    }
}

/// The factor of a suffix.
enum Scale {
    Decimal(i32),
    Binary(u32),
}

impl Scale {
    fn parse(suffix: &str) -> Option<Self> {
        Some(match suffix {
            "Ki" => Scale::Binary(10),
            "Mi" => Scale::Binary(20),
            "Gi" => Scale::Binary(30),
            "Ti" => Scale::Binary(40),
            "Pi" => Scale::Binary(50),
            "Ei" => Scale::Binary(60),
            "n" => Scale::Decimal(-9),
            "u" => Scale::Decimal(-6),
            "m" => Scale::Decimal(-3),
            "" => Scale::Decimal(0),
            "k" => Scale::Decimal(3),
            "M" => Scale::Decimal(6),
            "G" => Scale::Decimal(9),
            "T" => Scale::Decimal(12),
            "P" => Scale::Decimal(15),
            "E" => Scale::Decimal(18),
            _ => Scale::Decimal(decimal_exponent(suffix)?),
        })
    }
}

/// Parses `e3`, `E-2`, `e+10`. Returns the exponent, limited to values beyond which every number is zero or out of range.
fn decimal_exponent(suffix: &str) -> Option<i32> {
    let signed = suffix.strip_prefix(['e', 'E'])?;
    let digits = signed.strip_prefix(['+', '-']).unwrap_or(signed);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let magnitude = digits.parse::<i32>().unwrap_or(i32::MAX).min(100_000);
    Some(if signed.starts_with('-') { -magnitude } else { magnitude })
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn bytes(text: &str) -> Result<u64, QuantityError> {
        parse(&Quantity(text.to_owned())).map(|bytes| bytes.0)
    }

    #[rstest]
    #[case::plain("1048576", 1 << 20)]
    #[case::binary("1Mi", 1 << 20)]
    #[case::signed("+4Mi", 4 << 20)]
    #[case::decimal("10G", 10_000_000_000)]
    #[case::fraction_of_binary("1.5Gi", 3 << 29)]
    #[case::no_integer_part(".5Ki", 512)]
    #[case::no_fraction_digits("5.", 5)]
    #[case::exponent("1.5e3", 1500)]
    #[case::negative_exponent("1500E-3", 2)]
    #[case::exa_is_not_an_exponent("1E", 1_000_000_000_000_000_000)]
    #[case::milli_rounds_up("1m", 1)]
    #[case::nano_rounds_up("1000000001n", 2)]
    #[case::fraction_rounds_up("1.0000001Ki", 1025)]
    #[case::leading_zeros("000000000000000000000000000000001Ki", 1024)]
    #[case::trailing_zeros("1.0000000000000000000000000000000000Ki", 1024)]
    #[case::zero("0", 0)]
    #[case::negative_zero("-0Gi", 0)]
    #[case::zero_times_anything("0e99999999999", 0)]
    #[case::largest("9223372036854775807", i64::MAX as u64)]
    #[case::tiny_exponent("1e-99999999999", 1)]
    fn parses(#[case] text: &str, #[case] expected: u64) {
        assert_eq!(bytes(text), Ok(expected));
    }

    #[rstest]
    #[case::empty("", QuantityError::Malformed)]
    #[case::sign_only("-", QuantityError::Malformed)]
    #[case::suffix_only("Mi", QuantityError::Malformed)]
    #[case::dot_only(".", QuantityError::Malformed)]
    #[case::unknown_suffix("1MB", QuantityError::Malformed)]
    #[case::lower_case_binary("1mi", QuantityError::Malformed)]
    #[case::bare_exponent_sign("1e+", QuantityError::Malformed)]
    #[case::space("1 Mi", QuantityError::Malformed)]
    #[case::two_dots("1.2.3", QuantityError::Malformed)]
    #[case::other_digits("\u{0661}Mi", QuantityError::Malformed)]
    #[case::one_more("9223372036854775808", QuantityError::TooLarge)]
    #[case::eight_exbibytes("8Ei", QuantityError::TooLarge)]
    #[case::exponent("1e19", QuantityError::TooLarge)]
    #[case::absurd_exponent("1e99999999999", QuantityError::TooLarge)]
    #[case::many_digits("99999999999999999999999999999999999999999999999999Ei", QuantityError::TooLarge)]
    #[case::negative("-1Mi", QuantityError::Negative)]
    fn other_text_is_rejected(#[case] text: &str, #[case] error: fn(String) -> QuantityError) {
        assert_eq!(bytes(text), Err(error(text.to_owned())));
    }

    proptest! {
        // The test checks that no input panics or overflows.
        #[test]
        fn any_text_is_parsed_or_rejected(
            text in "\\PC{0,40}|[+-]?[0-9]{0,45}\\.?[0-9]{0,45}([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{0,12})?",
        ) {
            prop_assert!(bytes(&text).is_ok_and(|value| value <= i64::MAX as u64) || bytes(&text).is_err());
        }

        #[test]
        fn formatted_quantity_parses_back(value in 0..=i64::MAX as u64) {
            prop_assert_eq!(parse(&format(Bytes(value))), Ok(Bytes(value)));
        }

        #[test]
        fn parsed_size_is_rounded_up(integer in 0u64..1 << 20, thousandths in 0u64..1000, shift in 1u32..5) {
            let suffix = ["", "Ki", "Mi", "Gi", "Ti"][shift as usize];
            let parsed = u128::from(bytes(&std::format!("{integer}.{thousandths:03}{suffix}")).unwrap());
            let thousandths_of_quantity = (u128::from(integer) * 1000 + u128::from(thousandths)) << (10 * shift);
            prop_assert!(parsed * 1000 >= thousandths_of_quantity);
            prop_assert!(parsed == 0 || (parsed - 1) * 1000 < thousandths_of_quantity);
        }
    }

    #[rstest]
    #[case(0, "0")]
    #[case(1, "1")]
    #[case(1 << 20, "1Mi")]
    #[case(3 << 19, "1536Ki")]
    #[case(1 << 60, "1Ei")]
    fn formats_with_the_largest_suffix(#[case] value: u64, #[case] expected: &str) {
        assert_eq!(format(Bytes(value)).0, expected);
    }
}
