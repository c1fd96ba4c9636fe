//! A reader of standard output that does not read, such as less that waits for a key.

use std::process::{Command, Stdio};
use std::time::Duration;

use h2::{Ping, server};
use prost::Message;
use prost::bytes::{BufMut, Bytes, BytesMut};
use tokio::net::UnixListener;
use tonic::codegen::http::{HeaderMap, Response};

/// More than a pipe holds.
const TEXT_BYTES: usize = 256 << 10;

/// The longest time that the test waits.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns one message of gRPC with a line of log.
fn message() -> Bytes {
    let line = node_debug::proto::LogLine { text: vec![b'x'; TEXT_BYTES], ..Default::default() };
    let response = node_debug::proto::LogsResponse { lines: vec![line] }.encode_to_vec();
    let mut message = BytesMut::new();
    message.put_u8(0);
    message.put_u32(u32::try_from(response.len()).unwrap());
    message.put_slice(&response);
    message.freeze()
}

#[tokio::test]
async fn unknown_call_reports_version_mismatch() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("service.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let dbg = Command::new(env!("CARGO_BIN_EXE_dbg"))
        .args(["--address", &format!("unix://{}", path.display()), "logs"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let mut connection = server::handshake(stream).await.unwrap();
    let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
    let response = Response::builder().header("content-type", "application/grpc").header("grpc-status", "12");
    respond.send_response(response.body(()).unwrap(), true).unwrap();
    let driver = tokio::spawn(async move { while connection.accept().await.is_some() {} });
    let output = tokio::task::spawn_blocking(|| dbg.wait_with_output()).await.unwrap().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("another version of node-debug; check --address"), "{error}");
    driver.abort();
}

#[tokio::test]
async fn pings_succeed_while_reader_pauses() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("service.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut dbg = Command::new(env!("CARGO_BIN_EXE_dbg"))
        .args(["--address", &format!("unix://{}", path.display()), "logs", "agent", "--follow"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = dbg.stdout.take().unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let mut connection = server::handshake(stream).await.unwrap();
    let mut pings = connection.ping_pong().unwrap();
    let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
    let response = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
    let mut body = respond.send_response(response, false).unwrap();
    body.send_data(message(), false).unwrap();
    let driver = tokio::spawn(async move { while connection.accept().await.is_some() {} });

    // dbg waits for its reader once the pipe has data: it writes all of the line, and the pipe does not hold it.
    let pipe = tokio::net::unix::pipe::Receiver::from_owned_fd(stdout.into()).unwrap();
    tokio::time::timeout(TIMEOUT, pipe.readable()).await.unwrap().unwrap();
    let pong = tokio::time::timeout(TIMEOUT, pings.ping(Ping::opaque())).await;
    pong.expect("dbg responds while its reader pauses").unwrap();

    body.send_trailers(HeaderMap::new()).ok();
    dbg.kill().unwrap();
    dbg.wait().unwrap();
    driver.abort();
}
