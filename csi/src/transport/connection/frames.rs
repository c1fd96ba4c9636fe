//! The HTTP/2 frames (RFC 9113, section 4.1) of a client. Passes them on unchanged, except for the header blocks in
//! them.

use super::header_block;

/// The connection preface, which a client sends first.
const PREFACE: usize = 24;

/// The size of a frame header: length (3 bytes), type, flags and stream (4 bytes).
const FRAME_HEADER: usize = 9;

const HEADERS: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// The size of the stream dependency and the weight.
const PRIORITY_FIELDS: usize = 5;

/// The maximum frame size. A sender may exceed it only after the receiver has agreed, which this receiver
/// does not.
const MAX_FRAME_SIZE: usize = 16_384;

/// The position in the stream of bytes.
#[derive(Debug)]
pub(super) struct Frames {
    /// The number of remaining bytes that are passed on unchanged.
    pass: usize,
    /// The received bytes of the current frame. Only the header is kept, unless the frame is a header block.
    frame: Vec<u8>,
}

impl Frames {
    pub(super) fn new() -> Self {
        Self { pass: PREFACE, frame: Vec::new() }
    }

    /// Processes received bytes, and appends the bytes to be passed on to `out`.
    pub(super) fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
        while !input.is_empty() {
            let wanted = if self.pass > 0 { self.pass } else { self.missing() };
            let (part, rest) = input.split_at(wanted.min(input.len()));
            input = rest;
            if self.pass > 0 {
                self.pass -= part.len();
                out.extend_from_slice(part);
                continue;
            }
            self.frame.extend_from_slice(part);
            if self.missing() > 0 {
                continue;
            }
            if is_complete_header_block(&self.frame) {
                match rewritten(&self.frame) {
                    Some(frame) => out.extend_from_slice(&frame),
                    None => out.extend_from_slice(&self.frame),
                }
            } else {
                self.pass = payload_length(&self.frame);
                out.extend_from_slice(&self.frame);
            }
            self.frame.clear();
        }
    }

    /// Passes on the rest at the end of the stream.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.frame);
    }

    /// Returns the number of missing bytes of the frame, as far as the frame is buffered.
    fn missing(&self) -> usize {
        let have = self.frame.len();
        match FRAME_HEADER.saturating_sub(have) {
            0 if is_complete_header_block(&self.frame) => FRAME_HEADER + payload_length(&self.frame) - have,
            header => header,
        }
    }
}

fn payload_length(frame: &[u8]) -> usize {
    usize::from(frame[0]) << 16 | usize::from(frame[1]) << 8 | usize::from(frame[2])
}

/// Returns `true` if the frame is a complete header block. Only long header blocks consist of several frames,
/// and those of calls to this driver are short.
fn is_complete_header_block(frame: &[u8]) -> bool {
    frame[3] == HEADERS && frame[4] & END_HEADERS != 0 && payload_length(frame) <= MAX_FRAME_SIZE
}

/// Returns the frame with another authority. Returns `None` if the frame has no authority to replace, or if
/// it is malformed. The receiver also detects malformed frames, and handles them.
fn rewritten(frame: &[u8]) -> Option<Vec<u8>> {
    let (header, mut payload) = frame.split_at(FRAME_HEADER);
    let flags = header[4];
    if flags & PADDED != 0 {
        let (length, padded) = payload.split_first()?;
        payload = &padded[..padded.len().checked_sub(usize::from(*length))?];
    }
    let priority = if flags & PRIORITY != 0 { PRIORITY_FIELDS } else { 0 };
    let (priority, block) = payload.split_at_checked(priority)?;
    let block = header_block::with_neutral_authority(block)?;

    let length = u32::try_from(priority.len() + block.len()).ok()?.to_be_bytes();
    let mut frame = Vec::with_capacity(FRAME_HEADER + priority.len() + block.len());
    frame.extend_from_slice(&length[1..]);
    frame.extend_from_slice(&[HEADERS, flags & !PADDED]);
    frame.extend_from_slice(&header[5..]);
    frame.extend_from_slice(priority);
    frame.extend_from_slice(&block);
    Some(frame)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// Returns the output if the input arrives in pieces of this size.
    fn pass(input: &[u8], piece: usize) -> Vec<u8> {
        let (mut frames, mut out) = (Frames::new(), Vec::new());
        input.chunks(piece).for_each(|piece| frames.feed(piece, &mut out));
        frames.finish(&mut out);
        out
    }

    const PREFACE_BYTES: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    /// `:method: POST`, then `:authority: %2Fa`, which is added to the dynamic table.
    const BLOCK: &[u8] = b"\x83\x41\x04%2Fa";
    const NEUTRAL: &[u8] = b"\x83\x41\x01-";

    #[test]
    fn only_header_blocks_are_changed_however_the_bytes_arrive() {
        let settings = frame(4, 0, &[0; 6]);
        let data = frame(0, 1, b"\x41\x04%2Fa");
        let parts = [PREFACE_BYTES, &settings, &frame(1, 0x4, BLOCK), &data, &frame(1, 0x5, BLOCK)];
        let expected = [PREFACE_BYTES, &settings, &frame(1, 0x4, NEUTRAL), &data, &frame(1, 0x5, NEUTRAL)];
        for piece in [1, 2, 3, 7, 8192] {
            assert_eq!(pass(&parts.concat(), piece), expected.concat(), "in pieces of {piece}");
        }
    }

    #[test]
    fn padding_is_removed_and_priority_is_kept() {
        let priority = [0, 0, 0, 3, 200];
        let padded = [&[2], &priority[..], BLOCK, &[0, 0]].concat();
        let expected = [PREFACE_BYTES, &frame(1, 0x24, &[&priority[..], NEUTRAL].concat())].concat();
        assert_eq!(pass(&[PREFACE_BYTES, &frame(1, 0x2c, &padded)].concat(), 4), expected);
    }

    #[test]
    fn other_and_malformed_frames_are_passed_on_unchanged() {
        for odd in [
            frame(1, 0x0, BLOCK),
            frame(1, 0xc, &[9, 0x83]),
            frame(1, 0x24, &[0]),
            frame(1, 0x4, b"\x41\x7f"),
            frame(1, 0x4, &[]),
            frame(9, 0x4, BLOCK),
            frame(1, 0x4, BLOCK)[..12].to_vec(),
        ] {
            let input = [PREFACE_BYTES, &odd].concat();
            assert_eq!(pass(&input, 5), input);
        }
    }

    proptest! {
        #[test]
        fn the_output_for_arbitrary_bytes_does_not_depend_on_the_read_size(
            input in proptest::collection::vec(prop_oneof![any::<u8>(), 0..10u8], 0..400),
            piece in 1..50usize,
        ) {
            let input = [PREFACE_BYTES, &input].concat();
            let whole = pass(&input, input.len());
            prop_assert!(whole.len() <= input.len());
            prop_assert_eq!(pass(&input, piece), whole);
        }
    }
}
