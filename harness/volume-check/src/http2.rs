//! One gRPC call over HTTP/2, as plain bytes: the programs of the test pods need no client.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::volume::{Checked, named};

const TIMEOUT: Duration = Duration::from_secs(10);

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// `:method: POST` and `:scheme: http`, by their numbers in the static table of HPACK (RFC 7541).
const METHOD_AND_SCHEME: &[u8] = &[0x83, 0x86];
/// The name `:path` in the same table.
const PATH: u8 = 0x04;
/// `:authority`, `content-type` and `te`, each with the length before the value.
const OTHER_HEADERS: &[u8] = b"\x01\x09localhost\x0f\x10\x10application/grpc\x00\x02te\x08trailers";
/// An empty message of protobuf: no compression, and a length of 0.
const EMPTY_MESSAGE: [u8; 5] = [0; 5];
/// `grpc-status: 12` (UNIMPLEMENTED), as HPACK compresses it with the Huffman code.
const UNIMPLEMENTED: [u8; 12] = [0x88, 0x9a, 0xca, 0xc8, 0xb2, 0x12, 0x34, 0xda, 0x8f, 0x82, 0x08, 0xbf];

/// Calls a method with an empty message on a Unix socket. Returns an error if there is no message in response: `UNIMPLEMENTED` if the
/// server does not have the method.
pub(crate) fn call(socket: &Path, method: &str) -> Checked {
    let mut stream = UnixStream::connect(socket).map_err(|e| named("connect", e))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(&request(method)?).map_err(|e| named("send the request", e))?;
    loop {
        let (kind, flags, payload) = read_frame(&mut stream).map_err(|e| named("read the response", e))?;
        match kind {
            DATA => return Ok(()),
            HEADERS if flags & END_STREAM == 0 => {}
            HEADERS if payload.windows(UNIMPLEMENTED.len()).any(|bytes| bytes == UNIMPLEMENTED) => {
                return Err("UNIMPLEMENTED".into());
            }
            HEADERS | RST_STREAM | GOAWAY => {
                return Err(format!("the response has no message: frame {kind}, {payload:02x?}").into());
            }
            _ => {}
        }
    }
}

fn request(method: &str) -> Checked<Vec<u8>> {
    let mut headers = METHOD_AND_SCHEME.to_vec();
    headers.extend([PATH, u8::try_from(method.len())?]);
    headers.extend(method.as_bytes());
    headers.extend(OTHER_HEADERS);
    let mut request = PREFACE.to_vec();
    push_frame(&mut request, SETTINGS, 0, 0, &[])?;
    push_frame(&mut request, HEADERS, END_HEADERS, 1, &headers)?;
    push_frame(&mut request, DATA, END_STREAM, 1, &EMPTY_MESSAGE)?;
    Ok(request)
}

fn push_frame(request: &mut Vec<u8>, kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Checked {
    request.extend([0, 0, u8::try_from(payload.len())?, kind, flags, 0, 0, 0, stream]);
    request.extend(payload);
    Ok(())
}

/// Returns the type, the flags and the payload of the next frame.
fn read_frame(stream: &mut UnixStream) -> io::Result<(u8, u8, Vec<u8>)> {
    let mut header = [0; 9];
    stream.read_exact(&mut header)?;
    let [high, middle, low, kind, flags, ..] = header;
    let mut payload = vec![0; usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low)];
    stream.read_exact(&mut payload)?;
    Ok((kind, flags, payload))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    const FIRST_HEADERS: &[u8] = &[0, 0, 1, HEADERS, END_HEADERS, 0, 0, 0, 1, 0x88];
    const MESSAGE: &[u8] = &[0, 0, 5, DATA, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0];
    /// Headers that end the response: 200, and a `grpc-status` of 12 or of 14.
    const WITHOUT_METHOD: &[u8] =
        b"\0\0\x0e\x01\x05\0\0\0\x01\x88\x40\x88\x9a\xca\xc8\xb2\x12\x34\xda\x8f\x82\x08\xbf";
    const UNAVAILABLE: &[u8] =
        b"\0\0\x0e\x01\x05\0\0\0\x01\x88\x40\x88\x9a\xca\xc8\xb2\x12\x34\xda\x8f\x82\x0b\x5f";

    /// Returns the outcome of a call to a server that responds with these bytes.
    fn outcome(response: &[&[u8]]) -> String {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let response = response.concat();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; super::request("/a.B/C").unwrap().len()];
            stream.read_exact(&mut request).unwrap();
            stream.write_all(&response).unwrap();
        });
        let outcome = call(&socket, "/a.B/C");
        server.join().unwrap();
        outcome.map_or_else(|error| error.to_string(), |()| "a message".to_owned())
    }

    #[test]
    fn only_a_message_is_a_success() {
        assert_eq!(outcome(&[FIRST_HEADERS, MESSAGE]), "a message");
        assert_eq!(outcome(&[WITHOUT_METHOD]), "UNIMPLEMENTED");
        assert!(outcome(&[UNAVAILABLE]).starts_with("the response has no message"));
        assert!(outcome(&[FIRST_HEADERS]).starts_with("read the response"));
    }
}
