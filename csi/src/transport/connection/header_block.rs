//! The structure of a compressed header block (RFC 7541, section 6).

/// The index of `:authority` in the static table.
const AUTHORITY: u64 = 1;

/// A valid authority of minimum length.
const NEUTRAL: &[u8] = b"-";

/// Replaces every literal, non-empty `:authority` of the block. Returns `None` if there is none, or if the block is
/// malformed.
pub(super) fn with_neutral_authority(block: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(block.len());
    let mut replaced = false;
    let mut rest = block;
    while let Some(first) = rest.first() {
        let start = rest;
        let (prefix, is_literal) = match first {
            0x80.. => (7, false), // A field of the table.
            0x40.. => (6, true),  // A field to be put into the table.
            0x20.. => (5, false), // A new size of the table.
            _ => (4, true),       // A field that is not kept.
        };
        let name = integer(&mut rest, prefix)?;
        if !is_literal {
            out.extend_from_slice(consumed(start, rest));
            continue;
        }
        if name == 0 {
            string(&mut rest)?;
        }
        let before_value = consumed(start, rest);
        let value = string(&mut rest)?;
        if name == AUTHORITY && !value.is_empty() {
            out.extend_from_slice(before_value);
            // The length of the value, not Huffman-coded.
            out.push(NEUTRAL.len() as u8);
            out.extend_from_slice(NEUTRAL);
            replaced = true;
        } else {
            out.extend_from_slice(consumed(start, rest));
        }
    }
    replaced.then_some(out)
}

fn consumed<'a>(start: &'a [u8], rest: &[u8]) -> &'a [u8] {
    &start[..start.len() - rest.len()]
}

/// Reads an integer (section 5.1). Its low bits are those of the prefix in the first byte. If all of them are
/// set, groups of seven bits follow.
fn integer(rest: &mut &[u8], prefix: u32) -> Option<u64> {
    let mut next = || {
        let (byte, tail) = rest.split_first()?;
        *rest = tail;
        Some(u64::from(*byte))
    };
    let all_ones = (1 << prefix) - 1;
    let mut value = next()? & all_ones;
    if value < all_ones {
        return Some(value);
    }
    // More than four groups exceed the size of a frame.
    for group in 0..4 {
        let byte = next()?;
        value += (byte & 0x7f) << (7 * group);
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Reads a string (section 5.2): a bit for Huffman coding, a length, and the bytes.
fn string<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(integer(rest, 7)?).ok()?;
    let (text, tail) = rest.split_at_checked(length)?;
    *rest = tail;
    Some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::kept_in_the_table(
        b"\x83\x86\x41\x04%2Fa\x40\x02te\x08trailers",
        b"\x83\x86\x41\x01-\x40\x02te\x08trailers"
    )]
    #[case::not_kept(b"\x01\x04%2Fa", b"\x01\x01-")]
    #[case::never_kept(b"\x11\x04%2Fa", b"\x11\x01-")]
    // Huffman-coded, as in the RFC's example C.4.1: www.example.com.
    #[case::coded(
        b"\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff",
        b"\x82\x86\x84\x41\x01-"
    )]
    #[case::after_a_new_table_size(b"\x3f\xe1\x1f\x41\x01a\xbe", b"\x3f\xe1\x1f\x41\x01-\xbe")]
    fn an_authority_is_replaced(#[case] block: &[u8], #[case] expected: &[u8]) {
        assert_eq!(with_neutral_authority(block).unwrap(), expected);
    }

    #[test]
    fn a_long_authority_is_replaced() {
        // 127 + 0x49 = 200 bytes.
        let block = [b"\x41\x7f\x49", &[b'a'; 200][..], b"\x83"].concat();
        assert_eq!(with_neutral_authority(&block).unwrap(), b"\x41\x01-\x83");
    }

    #[rstest]
    #[case::none(b"\x83\x86\x84")]
    #[case::reference(b"\x83\xbe")]
    #[case::empty(b"\x41\x00")]
    #[case::path_that_looks_like_one(b"\x44\x04\x41\x02%2")]
    #[case::cut_off(b"\x41\x04%2")]
    #[case::length_without_end(b"\x41\xff\xff\xff\xff\xff\xff\xff\x00")]
    #[case::nothing(b"")]
    fn blocks_without_an_authority_and_malformed_blocks_are_not_changed(#[case] block: &[u8]) {
        assert_eq!(with_neutral_authority(block), None);
    }

    proptest! {
        #[test]
        fn an_arbitrary_block_never_grows_and_is_replaced_once(block in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(rewritten) = with_neutral_authority(&block) {
                prop_assert!(rewritten.len() <= block.len());
                prop_assert_eq!(with_neutral_authority(&rewritten), Some(rewritten));
            }
        }
    }
}
