//! Tests of the CSI socket.

use std::path::Path;

use clap::Parser;

use super::*;
use crate::transport::raw_client::{RawClient, frame, header_block};

const GET_PLUGIN_INFO: &str = "/csi.v1.Identity/GetPluginInfo";

/// Runs a test with the socket of a driver without storage.
async fn with_driver(test: impl AsyncFnOnce(&Path)) {
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let args = Args::parse_from([
        "loopfs-csi".to_owned(),
        "--driver-name=csi.loopfs.dev".to_owned(),
        "--node-name=node-1".to_owned(),
        format!("--data-dir={}", path("")),
        format!("--kubelet-dir={}", path("")),
        format!("--endpoint=unix://{}", path("csi.sock")),
    ]);
    let endpoint = args.endpoint.clone();
    let stop = CancellationToken::new();
    // The driver listens before its first wait.
    let driver = serve(args, stop.clone());
    let test = async {
        test(&endpoint).await;
        stop.cancel();
    };
    let (served, ()) = tokio::join!(driver, test);
    served.unwrap();
}

/// The kubelet, the sidecars of Kubernetes and csi-sanity send this authority.
#[tokio::test]
async fn a_call_with_localhost_as_authority_succeeds() {
    with_driver(async |socket| {
        let mut client = RawClient::connect(socket).await;
        client.call(1, &header_block(GET_PLUGIN_INFO, "localhost")).await;
        client.receive(b"csi.loopfs.dev").await;
    })
    .await;
}

/// Authorities are rewritten on the registration socket only.
#[tokio::test]
async fn a_call_with_the_path_as_authority_is_reset() {
    const RST_STREAM: u8 = 3;
    const PROTOCOL_ERROR: [u8; 4] = [0, 0, 0, 1];
    with_driver(async |socket| {
        let mut client = RawClient::connect(socket).await;
        client.call(1, &header_block(GET_PLUGIN_INFO, "%2Fcsi%2Fcsi.sock")).await;
        client.receive(&frame(RST_STREAM, 0, 1, &PROTOCOL_ERROR)).await;
        // The connection stays usable.
        client.call(3, &header_block(GET_PLUGIN_INFO, "localhost")).await;
        client.receive(b"csi.loopfs.dev").await;
    })
    .await;
}
