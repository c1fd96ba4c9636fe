//! Tests of the CSI socket and of the control socket.

use std::path::Path;
use std::time::Instant;

use clap::Parser;
use csi_wire::volumes::TakeCustodyRequest;
use csi_wire::volumes::volumes_client::VolumesClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tonic::Code;
use tonic::transport::Endpoint;

use super::*;

const GET_PLUGIN_INFO: &str = "/csi.v1.Identity/GetPluginInfo";

/// Returns the arguments of a driver without storage.
pub(crate) fn args(scratch: &Path) -> Args {
    let path = |name: &str| scratch.join(name).display().to_string();
    Args::parse_from([
        "loopfs-csi".to_owned(),
        "--driver-name=csi.loopfs.dev".to_owned(),
        "--node-name=node-1".to_owned(),
        format!("--data-dir={}", path("")),
        format!("--kubelet-dir={}", path("")),
        format!("--endpoint=unix://{}", path("csi.sock")),
        format!("--control-endpoint=unix://{}", path("control.sock")),
    ])
}

/// Runs a test with the socket and the control socket of a driver without storage. Returns its result after the driver has stopped.
async fn with_driver<T>(test: impl AsyncFnOnce(&Path, &Path) -> T) -> T {
    let scratch = tempfile::tempdir().unwrap();
    let args = args(scratch.path());
    let (endpoint, control) = (args.endpoint.clone(), scratch.path().join("control.sock"));
    let stop = CancellationToken::new();
    // The driver listens before its first wait.
    let driver = serve(args, stop.clone());
    let test = async {
        let result = test(&endpoint, &control).await;
        stop.cancel();
        result
    };
    let (served, result) = tokio::join!(driver, test);
    served.unwrap();
    result
}

/// The kubelet, the sidecars of Kubernetes and csi-sanity send this authority.
#[tokio::test]
async fn call_with_localhost_authority_succeeds() {
    with_driver(async |socket, _| {
        let mut client = RawClient::connect(socket).await;
        client.call(1, &header_block(GET_PLUGIN_INFO, "localhost")).await;
        client.receive(b"csi.loopfs.dev").await;
    })
    .await;
}

/// Authorities are rewritten on the registration socket only.
#[tokio::test]
async fn call_with_path_authority_is_reset() {
    const RST_STREAM: u8 = 3;
    const PROTOCOL_ERROR: [u8; 4] = [0, 0, 0, 1];
    with_driver(async |socket, _| {
        let mut client = RawClient::connect(socket).await;
        client.call(1, &header_block(GET_PLUGIN_INFO, "%2Fcsi%2Fcsi.sock")).await;
        client.receive(&frame(RST_STREAM, 0, 1, &PROTOCOL_ERROR)).await;
        // The connection stays usable.
        client.call(3, &header_block(GET_PLUGIN_INFO, "localhost")).await;
        client.receive(b"csi.loopfs.dev").await;
    })
    .await;
}

/// No connection sends anything, and together they are more than the driver keeps open.
#[tokio::test]
async fn idle_connections_delay_no_call_and_no_exit() {
    let (_open, stopped_at) = with_driver(async |_, control| {
        let mut idle = Vec::new();
        for _ in 0..100 {
            idle.push(UnixStream::connect(control).await.unwrap());
        }
        let mut client = RawClient::connect(control).await;
        client.call(1, &header_block(GET_PLUGIN_INFO, "localhost")).await;
        client.receive(b"csi.loopfs.dev").await;
        let mut sent = Vec::new();
        let closed = tokio::time::timeout(RESPONSE_TIMEOUT, idle[0].read_to_end(&mut sent)).await;
        closed.expect("the oldest connection is closed").unwrap();
        (idle, Instant::now())
    })
    .await;
    assert!(stopped_at.elapsed() < SHUTDOWN_TIMEOUT);
}

#[tokio::test]
async fn requests_that_are_too_long_are_refused() {
    with_driver(async |_, control| {
        let socket = Endpoint::try_from(format!("unix://{}", control.display())).unwrap();
        let mut volumes = VolumesClient::new(socket.connect().await.unwrap());
        for (length, code) in [
            (0, Code::InvalidArgument),
            // The driver has no storage.
            (64, Code::FailedPrecondition),
            (65, Code::InvalidArgument),
            (MAX_REQUEST_BYTES, Code::OutOfRange),
        ] {
            let request = TakeCustodyRequest { node_uid: "u".repeat(length) };
            assert_eq!(volumes.take_custody(request).await.unwrap_err().code(), code, "{length} bytes");
        }
    })
    .await;
}

/// The maximum time until a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);

/// A minimal HTTP/2 client, which sends any authority.
pub(crate) struct RawClient(UnixStream);

impl RawClient {
    pub(crate) async fn connect(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).await.unwrap();
        let settings = frame(4, 0, 0, &[]);
        stream.write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings[..]].concat()).await.unwrap();
        Self(stream)
    }

    /// Sends a call with this header block and an empty message, on a stream of its own.
    pub(crate) async fn call(&mut self, stream: u8, header_block: &[u8]) {
        let empty_message = [0; 5];
        let call = [frame(1, 0x4, stream, header_block), frame(0, 0x1, stream, &empty_message)].concat();
        self.0.write_all(&call).await.unwrap();
    }

    /// Waits until the server has sent these bytes.
    pub(crate) async fn receive(&mut self, expected: &[u8]) {
        let receive = async {
            let mut received = Vec::new();
            while !received.windows(expected.len()).any(|window| window == expected) {
                assert_ne!(self.0.read_buf(&mut received).await.unwrap(), 0, "hung up after {received:x?}");
            }
        };
        tokio::time::timeout(RESPONSE_TIMEOUT, receive).await.expect("a response");
    }
}

/// Returns the header block of a call. All fields except for the method and the scheme are added to the dynamic table,
/// in the order path, authority, content type, te.
pub(crate) fn header_block(path: &str, authority: &str) -> Vec<u8> {
    let literal =
        |first: u8, text: &str| [&[first, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    [
        // :method: POST, :scheme: http.
        vec![0x83, 0x86],
        literal(0x44, path),
        literal(0x41, authority),
        // content-type is 31 in the static table; te is not in it.
        literal(0x5f, "application/grpc"),
        literal(0x40, "te"),
        literal(0, "trailers")[1..].to_vec(),
    ]
    .concat()
}

/// Returns an HTTP/2 frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}
