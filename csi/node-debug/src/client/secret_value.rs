//! Where a secret ends, given where it begins: the values that programs print in Go, Rust, JSON, YAML and protobuf text.

use std::ops::Range;

/// The extent of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueExtent {
    /// One word, one string, or one collection.
    Value,
    /// One string or one list, else everything up to the end of the line: a header may have spaces and commas.
    Line,
    /// As [`Self::Value`]. The kubelet prints an environment variable without quotes, and `ValueFrom` follows it.
    Environment,
}

/// A value that was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FoundValue {
    /// The bytes to replace. Quotes around a string are not among them.
    pub(super) range: Range<usize>,
    /// The brackets that would close a collection which continues on the next line, the innermost last.
    pub(super) open: Vec<u8>,
}

/// Finds the value that begins at `start`. Returns `None` if there is none.
pub(super) fn find(text: &str, start: usize, extent: ValueExtent) -> Option<FoundValue> {
    let bytes = text.as_bytes();
    if let Some(quote) = Quote::at(bytes, start) {
        let begin = start + quote.escapes + 1;
        return Some(FoundValue { range: begin..quote.end(bytes, begin).content, open: Vec::new() });
    }
    match (extent, bytes.get(start)?) {
        (_, b'<' | b'{' | b'[' | b'(') => Some(collection(text, start, start)),
        (ValueExtent::Line, _) => Some(FoundValue { range: start..bytes.len(), open: Vec::new() }),
        (ValueExtent::Environment, _) => match text[start..].find(",ValueFrom") {
            Some(length) => Some(FoundValue { range: start..start + length, open: Vec::new() }),
            None => word(text, start),
        },
        (ValueExtent::Value, _) => word(text, start),
    }
}

/// Finds the end of a collection of which earlier lines have the beginning. Returns what is still open at the end of the line.
pub(super) fn close(text: &str, open: Vec<u8>) -> FoundValue {
    let (end, open) = balanced(text.as_bytes(), 0, open);
    FoundValue { range: 0..end, open }
}

/// Finds a value without quotes. Collections may be in it, as in `Some("x")`, `&Secret{..}` and `map[string]string{..}`.
fn word(text: &str, start: usize) -> Option<FoundValue> {
    let bytes = text.as_bytes();
    let mut at = start;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'[' if text[start..at].ends_with("map") && !is_type(&text[at..]) => {
                // A value of the map may have a bracket, and nothing escapes it.
                let end = text.rfind(']').filter(|end| *end > at).map_or(bytes.len(), |end| end + 1);
                return Some(FoundValue { range: start..end, open: Vec::new() });
            }
            b'[' | b'{' | b'(' => {
                let found = collection(text, start, at);
                at = found.range.end;
                if !found.open.is_empty() {
                    return Some(found);
                }
            }
            // A string with a prefix, such as b"x".
            b'"' | b'\'' if (1..=2).contains(&(at - start)) && is_prefix(&bytes[start..at]) => {
                at = Quote { escapes: 0, mark: *byte }.end(bytes, at + 1).after;
            }
            b'&' if at == start => at += 1,
            b'\\' if is_escaped_end(bytes, at) => break,
            b',' | b';' | b'&' | b'}' | b']' | b')' | b'"' | b'\'' => break,
            byte if byte.is_ascii_whitespace() => break,
            _ => at += backslashes(bytes, at).max(1),
        }
    }
    (at > start).then_some(FoundValue { range: start..at, open: Vec::new() })
}

fn is_prefix(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| b"bBrRuUfFcC".contains(byte))
}

/// Returns `true` for the key type of a Go map, as in `map[string]string{..}`.
fn is_type(text: &str) -> bool {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_.*".contains(c);
    let inner = text.strip_prefix('[').and_then(|text| text.split_once(']'));
    inner.is_some_and(|(key, rest)| {
        !key.is_empty() && key.chars().all(is_name) && rest.starts_with(|c: char| is_name(c))
    })
}

/// Returns `true` for backslashes before a quote or before the end of a line that is in a string.
fn is_escaped_end(bytes: &[u8], at: usize) -> bool {
    let after = bytes.get(at + backslashes(bytes, at));
    after.is_some_and(|byte| b"\"'nr".contains(byte))
}

fn backslashes(bytes: &[u8], at: usize) -> usize {
    bytes.iter().skip(at).take_while(|byte| **byte == b'\\').count()
}

/// Finds the end of the collection whose bracket is at `bracket`.
fn collection(text: &str, start: usize, bracket: usize) -> FoundValue {
    let bytes = text.as_bytes();
    let (end, open) = match closing(bytes[bracket]) {
        Some(closing) => balanced(bytes, bracket + 1, vec![closing]),
        None => (bracket, Vec::new()),
    };
    FoundValue { range: start..end, open }
}

fn closing(opening: u8) -> Option<u8> {
    match opening {
        b'{' => Some(b'}'),
        b'[' => Some(b']'),
        b'(' => Some(b')'),
        b'<' => Some(b'>'),
        _ => None,
    }
}

/// Returns the position after the bracket that closes the outermost of `open`. If there is none, the line was cut, or the
/// collection continues on the next line: then it returns the end of the line and, in the second case, what is open.
fn balanced(bytes: &[u8], mut at: usize, mut open: Vec<u8>) -> (usize, Vec<u8>) {
    let counts_angles = open.first() == Some(&b'>');
    while let (Some(byte), Some(innermost)) = (bytes.get(at), open.last()) {
        let begins_value = at == 0 || !bytes[at - 1].is_ascii_alphanumeric();
        match Quote::at(bytes, at).filter(|quote| quote.mark == b'"' || begins_value) {
            Some(quote) => at = quote.end(bytes, at + quote.escapes + 1).after,
            None => {
                if byte == innermost {
                    open.pop();
                } else if *byte != b'<' || counts_angles {
                    open.extend(closing(*byte));
                }
                at += backslashes(bytes, at).max(1);
            }
        }
    }
    let last = bytes.trim_ascii_end().last();
    let continues = last.is_none_or(|last| b"{[(<,".contains(last) || begins_line(bytes));
    if !open.is_empty() && !continues {
        open.clear();
    }
    (at, open)
}

/// Returns `true` for a line that is one entry of a collection printed over several lines.
fn begins_line(bytes: &[u8]) -> bool {
    bytes.first().is_some_and(u8::is_ascii_whitespace)
}

/// A quote that opens a string. In a string within a string, backslashes are before it: one in the first, three in the second.
#[derive(Clone, Copy)]
struct Quote {
    escapes: usize,
    mark: u8,
}

/// The end of a string.
struct StringEnd {
    content: usize,
    after: usize,
}

impl Quote {
    fn at(bytes: &[u8], at: usize) -> Option<Self> {
        let escapes = backslashes(bytes, at);
        let mark = *bytes.get(at + escapes)?;
        matches!(mark, b'"' | b'\'' | b'`').then_some(Self { escapes, mark })
    }

    /// Finds the quote that closes the string, or the end of the line.
    fn end(self, bytes: &[u8], begin: usize) -> StringEnd {
        let mut escapes = 0;
        for (at, byte) in bytes.iter().enumerate().skip(begin) {
            if *byte == b'\\' {
                escapes += 1;
                continue;
            }
            if *byte == self.mark && self.closes(escapes) {
                return StringEnd { content: at - escapes.min(self.escapes), after: at + 1 };
            }
            escapes = 0;
        }
        StringEnd { content: bytes.len(), after: bytes.len() }
    }

    /// Returns `true` if a quote after so many backslashes closes the string. Each level of strings within strings doubles
    /// the backslashes and adds one for the quote. Fewer than the opening quote has close a string around this one.
    fn closes(self, escapes: usize) -> bool {
        escapes.checked_sub(self.escapes).is_none_or(|more| (more / (self.escapes + 1)).is_multiple_of(2))
    }
}
