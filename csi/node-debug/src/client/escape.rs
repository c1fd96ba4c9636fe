//! Text of other programs, made safe for a terminal.

use std::fmt::Write;

/// Replaces everything that could move the cursor, change colours or reorder text. A component may have written any bytes.
pub(super) fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\t' => text.push(c),
                c if c.is_control() || is_invisible(c) => text.extend(c.escape_unicode()),
                c => text.push(c),
            }
        }
        for byte in chunk.invalid() {
            // Writing to a String cannot fail.
            write!(text, "\\x{byte:02x}").ok();
        }
    }
    text
}

/// Replaces the same in each line of a text, and ends the last one.
pub(super) fn escape_lines(bytes: &[u8]) -> String {
    let lines = bytes.split_inclusive(|byte| *byte == b'\n');
    let lines = lines.map(|line| line.strip_suffix(b"\n").unwrap_or(line));
    lines.map(|line| escape(line.strip_suffix(b"\r").unwrap_or(line)) + "\n").collect()
}

/// Characters that change the order or the lines of a text without being visible.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::plain("plain\ttext: ä€".as_bytes(), "plain\ttext: ä€")]
    #[case::colour(b"\x1b[31mred", "\\u{1b}[31mred")]
    #[case::title(b"\x1b]0;title\x07", "\\u{1b}]0;title\\u{7}")]
    #[case::eight_bit_control("\u{9b}31m".as_bytes(), "\\u{9b}31m")]
    #[case::carriage_return(b"good\rbad", "good\\u{d}bad")]
    #[case::right_to_left("a\u{202e}b".as_bytes(), "a\\u{202e}b")]
    #[case::not_utf8(b"a\xff\x80b", "a\\xff\\x80b")]
    fn control_characters_are_replaced(#[case] bytes: &[u8], #[case] text: &str) {
        assert_eq!(escape(bytes), text);
    }

    #[test]
    fn lines_stay_separate() {
        assert_eq!(escape_lines(b"one\r\n\n\x1btwo"), "one\n\n\\u{1b}two\n");
    }

    proptest! {
        #[test]
        fn no_control_character_remains(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            prop_assert!(escape(&bytes).chars().all(|c| c == '\t' || !c.is_control()));
        }
    }
}
