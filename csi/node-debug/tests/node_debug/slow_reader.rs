//! A reader of standard output that does not read, such as less that waits for a key.

use std::process::Stdio;
use std::time::Duration;

use h2::{Ping, server};
use prost::Message;
use prost::bytes::{BufMut, Bytes, BytesMut};
use tokio::net::UnixListener;
use tonic::codegen::http::{HeaderMap, Response};

use crate::support::{COMPONENT, command};

/// More than a pipe holds.
const CONTENT_BYTES: usize = 256 << 10;

/// The longest time that the test waits.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns one message of gRPC with a part of a log.
fn message() -> Bytes {
    let response =
        node_debug::proto::LogsResponse { content: b"x\n".repeat(CONTENT_BYTES / 2) }.encode_to_vec();
    let mut message = BytesMut::new();
    message.put_u8(0);
    message.put_u32(u32::try_from(response.len()).unwrap());
    message.put_slice(&response);
    message.freeze()
}

/// Otherwise, the keepalive of the connection would end it.
#[tokio::test]
async fn pings_succeed_while_reader_pauses() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("service.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut dbg = command(&path, &["logs", COMPONENT, "--follow"]).stdout(Stdio::piped()).spawn().unwrap();
    let stdout = dbg.stdout.take().unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let mut connection = server::handshake(stream).await.unwrap();
    let mut pings = connection.ping_pong().unwrap();
    let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
    let response = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
    let mut body = respond.send_response(response, false).unwrap();
    body.send_data(message(), false).unwrap();
    let driver = tokio::spawn(async move { while connection.accept().await.is_some() {} });

    // dbg waits for its reader once the pipe has data: the pipe does not hold all.
    let pipe = tokio::net::unix::pipe::Receiver::from_owned_fd(stdout.into()).unwrap();
    tokio::time::timeout(TIMEOUT, pipe.readable()).await.unwrap().unwrap();
    let pong = tokio::time::timeout(TIMEOUT, pings.ping(Ping::opaque())).await;
    pong.expect("dbg responds while its reader pauses").unwrap();

    body.send_trailers(HeaderMap::new()).ok();
    dbg.kill().unwrap();
    dbg.wait().unwrap();
    driver.abort();
}
