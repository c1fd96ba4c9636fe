//! Connections of clients that send the path of the socket as the authority.
//!
//! grpc-go sends the dialled address as `:authority`, percent-encoded. The kubelet dials a registration socket by its
//! bare path, so it sends `%2Fvar%2Flib%2Fkubelet%2F…`. This is not a valid authority, and the HTTP/2 library resets
//! the stream. The authority has no meaning on a unix socket, so it is replaced in the received data.
//!
//! Only the registration socket needs this. Clients of the CSI socket send `localhost`.
//!
//! Only the structure of the header compression (RFC 7541) has to be parsed. The replacement is one byte long and
//! therefore never longer than the original. An entry that the receiver adds to its dynamic table is thus never larger
//! than the sender's entry. The receiver's table never drops an entry that the sender's table still has, and later
//! references keep their meaning.
//!
//! `docs/decisions/0032-kubelet-authority.md` gives the reasons.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;

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

/// The index of `:authority` in the static table.
const AUTHORITY: u64 = 1;

/// A valid authority of minimum length.
const NEUTRAL: &[u8] = b"-";

/// Accepts connections for a gRPC server.
pub(crate) fn incoming(listener: UnixListener) -> impl Stream<Item = io::Result<Connection>> {
    UnixListenerStream::new(listener).map(|stream| stream.map(Connection::new))
}

/// A client's connection, with valid authorities.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    frames: Frames,
    /// Data to be read, from `taken` on.
    decoded: Vec<u8>,
    taken: usize,
}

impl Connection {
    fn new(stream: UnixStream) -> Self {
        Self { stream, frames: Frames::new(), decoded: Vec::new(), taken: 0 }
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let mut chunk = [0; 8192];
        while this.taken == this.decoded.len() {
            let mut received = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut received))?;
            this.decoded.clear();
            this.taken = 0;
            if received.filled().is_empty() {
                // An incomplete frame is passed on unchanged, once. The next read then reports the end.
                this.frames.finish(&mut this.decoded);
                break;
            }
            this.frames.feed(received.filled(), &mut this.decoded);
        }
        let ready = &this.decoded[this.taken..];
        let part = &ready[..ready.len().min(out.remaining())];
        out.put_slice(part);
        this.taken += part.len();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// The HTTP/2 frames (RFC 9113, section 4.1) of a client. Passes them on unchanged, except for the header blocks in
/// them.
#[derive(Debug)]
struct Frames {
    /// The number of remaining bytes that are passed on unchanged.
    pass: usize,
    /// The received bytes of the current frame. Only the header is kept, unless the frame is a header block.
    frame: Vec<u8>,
}

impl Frames {
    fn new() -> Self {
        Self { pass: PREFACE, frame: Vec::new() }
    }

    /// Processes received bytes, and appends the bytes to be passed on to `out`.
    fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
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
    fn finish(&mut self, out: &mut Vec<u8>) {
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
    let block = with_neutral_authority(block)?;

    let length = u32::try_from(priority.len() + block.len()).ok()?.to_be_bytes();
    let mut frame = Vec::with_capacity(FRAME_HEADER + priority.len() + block.len());
    frame.extend_from_slice(&length[1..]);
    frame.extend_from_slice(&[HEADERS, flags & !PADDED]);
    frame.extend_from_slice(&header[5..]);
    frame.extend_from_slice(priority);
    frame.extend_from_slice(&block);
    Some(frame)
}

/// Replaces every literal, non-empty `:authority` of a compressed header block (RFC 7541, section 6). Returns `None` if there is none, or if the block is
/// malformed.
fn with_neutral_authority(block: &[u8]) -> Option<Vec<u8>> {
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

    /// The result does not depend on the pieces in which the bytes arrive.
    #[test]
    fn only_header_blocks_are_changed() {
        let settings = frame(4, 0, &[0; 6]);
        let data = frame(0, 1, b"\x41\x04%2Fa");
        let parts = [PREFACE_BYTES, &settings, &frame(1, 0x4, BLOCK), &data, &frame(1, 0x5, BLOCK)];
        let expected = [PREFACE_BYTES, &settings, &frame(1, 0x4, NEUTRAL), &data, &frame(1, 0x5, NEUTRAL)];
        for piece in [1, 2, 3, 7, 8192] {
            assert_eq!(pass(&parts.concat(), piece), expected.concat(), "in pieces of {piece}");
        }
    }

    #[test]
    fn padding_is_removed_but_not_priority() {
        let priority = [0, 0, 0, 3, 200];
        let padded = [&[2], &priority[..], BLOCK, &[0, 0]].concat();
        let expected = [PREFACE_BYTES, &frame(1, 0x24, &[&priority[..], NEUTRAL].concat())].concat();
        assert_eq!(pass(&[PREFACE_BYTES, &frame(1, 0x2c, &padded)].concat(), 4), expected);
    }

    /// Frames of other types pass unchanged too.
    #[test]
    fn malformed_frames_pass_unchanged() {
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
        fn output_is_independent_of_read_size(
            input in proptest::collection::vec(prop_oneof![any::<u8>(), 0..10u8], 0..400),
            piece in 1..50usize,
        ) {
            let input = [PREFACE_BYTES, &input].concat();
            let whole = pass(&input, input.len());
            prop_assert!(whole.len() <= input.len());
            prop_assert_eq!(pass(&input, piece), whole);
        }
    }

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
    fn other_and_malformed_blocks_stay_unchanged(#[case] block: &[u8]) {
        assert_eq!(with_neutral_authority(block), None);
    }

    proptest! {
        /// A rewritten header block is never longer than the original.
        #[test]
        fn rewriting_twice_changes_nothing(block in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(rewritten) = with_neutral_authority(&block) {
                prop_assert!(rewritten.len() <= block.len());
                prop_assert_eq!(with_neutral_authority(&rewritten), Some(rewritten));
            }
        }
    }
}
