//! Log lines, and the split of a stream of bytes into lines.

use jiff::Timestamp;

use crate::proto::Level;

/// The bytes of a line that are kept. Longer lines are cut.
pub(crate) const MAX_LINE_BYTES: usize = 16 << 10;

/// A line of a component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) time: Timestamp,
    pub(crate) level: Level,
    /// The bytes that the component wrote, without the newline. They may be any bytes.
    pub(crate) text: Vec<u8>,
    /// Bytes of the line that are not in `text`.
    pub(crate) cut_bytes: u64,
    /// If this is not 0, the entry is no line: the source lost so many lines here before the service could read them.
    pub(crate) lost_lines: u64,
}

/// A line before its level and time are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RawLine {
    pub(crate) text: Vec<u8>,
    pub(crate) cut_bytes: u64,
}

/// Splits a stream into lines. It never holds more than [`MAX_LINE_BYTES`], whatever the component writes.
#[derive(Debug, Default)]
pub(crate) struct LineSplitter {
    unfinished: RawLine,
}

impl LineSplitter {
    /// Passes the lines that `bytes` completes to `line`.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut line: impl FnMut(RawLine)) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, is_complete) = match part.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (part, false),
            };
            let kept = text.len().min(MAX_LINE_BYTES - self.unfinished.text.len());
            self.unfinished.text.extend_from_slice(&text[..kept]);
            self.unfinished.cut_bytes += (text.len() - kept) as u64;
            if is_complete {
                line(self.take());
            }
        }
    }

    /// Returns the last line if the stream ended without a newline.
    pub(crate) fn finish(&mut self) -> Option<RawLine> {
        let unfinished = self.take();
        (unfinished != RawLine::default()).then_some(unfinished)
    }

    fn take(&mut self) -> RawLine {
        let mut line = std::mem::take(&mut self.unfinished);
        if line.text.last() == Some(&b'\r') && line.cut_bytes == 0 {
            line.text.pop();
        }
        line.text.shrink_to_fit();
        line
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(parts: &[&[u8]]) -> Vec<RawLine> {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        for part in parts {
            splitter.feed(part, |line| lines.push(line));
        }
        lines.extend(splitter.finish());
        lines
    }

    fn texts(parts: &[&[u8]]) -> Vec<String> {
        split(parts).into_iter().map(|line| String::from_utf8(line.text).unwrap()).collect()
    }

    #[test]
    fn lines_are_joined_from_parts() {
        assert_eq!(texts(&[b"one\ntw", b"o\r\n\nfour"]), ["one", "two", "", "four"]);
    }

    #[test]
    fn overlong_line_is_cut_and_counted() {
        let mut splitter = LineSplitter::default();
        for _ in 0..100 {
            splitter.feed(&[b'x'; MAX_LINE_BYTES], |_| panic!("no newline was written"));
            assert!(splitter.unfinished.text.capacity() <= 2 * MAX_LINE_BYTES);
        }
        let mut lines = Vec::new();
        splitter.feed(b"\nnext\n", |line| lines.push(line));
        assert_eq!(lines[0].text.len(), MAX_LINE_BYTES);
        assert_eq!(lines[0].cut_bytes, 99 * MAX_LINE_BYTES as u64);
        assert_eq!(lines[1], RawLine { text: b"next".to_vec(), cut_bytes: 0 });
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_chunks(
            bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), any::<u8>()], 0..200),
            at in 0..200usize,
        ) {
            let (first, second) = bytes.split_at(at.min(bytes.len()));
            prop_assert_eq!(split(&[first, second]), split(&[&bytes]));
        }
    }
}
