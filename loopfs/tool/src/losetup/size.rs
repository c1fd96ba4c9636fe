//! Sizes as losetup(8) reads them: `4096`, `4K`, `4KiB`, `4KB`, `1.5M`, `0x1000`.

use nix::errno::Errno;

const UNITS: &[u8] = b"KMGTPEZY";

/// Parses a size. `K` and `KiB` are 1024 bytes, `KB` is 1000 bytes; the case of the letters has no meaning.
///
/// Returns EINVAL if the text is no size, and ERANGE if the size has more than 64 bits.
pub(crate) fn parse(text: &[u8]) -> Result<u64, Errno> {
    let text = std::str::from_utf8(text).or(Err(Errno::EINVAL))?.trim_start();
    let (number, rest) = leading_number(text)?;
    let (fraction, unit) = match rest.strip_prefix('.') {
        Some(rest) => {
            let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
            rest.split_at(end)
        }
        None => ("", rest),
    };
    if unit.is_empty() {
        // A fraction of a byte is no size.
        return if rest.is_empty() { Ok(number) } else { Err(Errno::EINVAL) };
    }
    let factor = factor(unit)?;
    let whole = u128::from(number).checked_mul(factor).ok_or(Errno::ERANGE)?;
    let part = part(fraction, factor)?;
    u64::try_from(whole + part).or(Err(Errno::ERANGE))
}

/// Returns the number at the start, in the notation of C (decimal, `0x` or a leading 0), and the rest of the text.
fn leading_number(text: &str) -> Result<(u64, &str), Errno> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let hexadecimal = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let (digits, radix) = match hexadecimal {
        Some(digits) => (digits, 16),
        None if text.starts_with('0') && text.len() > 1 => (text, 8),
        None => (text, 10),
    };
    let end = digits.find(|letter: char| !letter.is_digit(radix)).unwrap_or(digits.len());
    let (number, rest) = digits.split_at(end);
    if number.is_empty() {
        return Err(Errno::EINVAL);
    }
    // All are digits, so only the range can be wrong.
    Ok((u64::from_str_radix(number, radix).or(Err(Errno::ERANGE))?, rest))
}

fn factor(unit: &str) -> Result<u128, Errno> {
    let (letter, rest) = unit.split_at_checked(1).ok_or(Errno::EINVAL)?;
    let base: u128 = match rest {
        "" => 1024,
        rest if rest.eq_ignore_ascii_case("ib") => 1024,
        rest if rest.eq_ignore_ascii_case("b") => 1000,
        _ => return Err(Errno::EINVAL),
    };
    let letter = letter.as_bytes()[0].to_ascii_uppercase();
    let exponent = UNITS.iter().position(|unit| *unit == letter).ok_or(Errno::EINVAL)?;
    Ok(base.pow(exponent as u32 + 1))
}

/// Returns the bytes of a decimal fraction of the unit.
fn part(digits: &str, factor: u128) -> Result<u128, Errno> {
    let digits = &digits[..digits.len().min(12)];
    if digits.is_empty() {
        return Ok(0);
    }
    let number: u128 = digits.parse().or(Err(Errno::EINVAL))?;
    Ok(number * factor / 10u128.pow(digits.len() as u32))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("0", 0)]
    #[case("4096", 4096)]
    #[case("4K", 4096)]
    #[case("4KiB", 4096)]
    #[case("4kb", 4000)]
    #[case("1.5M", 1_572_864)]
    #[case("0x10", 16)]
    #[case("010", 8)]
    #[case("15E", 15 << 60)]
    fn sizes_have_the_units_of_losetup(#[case] text: &str, #[case] bytes: u64) {
        assert_eq!(parse(text.as_bytes()), Ok(bytes));
    }

    /// The kernel tests compare further texts with util-linux.
    #[rstest]
    #[case("-1", Errno::EINVAL)]
    #[case("1 K", Errno::EINVAL)]
    #[case("1Ki", Errno::EINVAL)]
    #[case("1Q", Errno::EINVAL)]
    #[case("99999999999999999999", Errno::ERANGE)]
    fn other_texts_are_no_sizes(#[case] text: &str, #[case] errno: Errno) {
        assert_eq!(parse(text.as_bytes()), Err(errno));
    }
}
