//! The end of the process.

use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use node_debug::proto::StateRequest;
use node_debug::proto::node_debug_client::NodeDebugClient;

use crate::support::run;

/// The longest time that the test waits.
const TIMEOUT: Duration = Duration::from_secs(60);

fn signal(signal: &str, process: u32) {
    assert!(Command::new("kill").args([signal, &process.to_string()]).status().unwrap().success());
}

#[test]
fn hanging_disk_does_not_prevent_shutdown() {
    let directory = tempfile::tempdir().unwrap();
    // Opening a named pipe waits for a writer.
    let data_dir = directory.path().join("data");
    nix::unistd::mkfifo(&data_dir, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let socket = directory.path().join("run/node-debug.sock");
    let mut service = Command::new(env!("CARGO_BIN_EXE_node-debug"))
        .args([format!("--socket={}", socket.display()), format!("--data-dir={}", data_dir.display())])
        .spawn()
        .unwrap();
    let process = service.id();
    let deadline = Instant::now() + TIMEOUT;
    while run(&socket, &["condition", "list"]).code != Some(0) {
        assert!(Instant::now() < deadline, "the service does not listen");
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let call = runtime.block_on(async {
        let mut client = NodeDebugClient::connect(format!("unix://{}", socket.display())).await.unwrap();
        let mut parts = client.state(StateRequest {}).await.unwrap().into_inner();
        // The service sends these parts while it reads the quotas.
        while parts.message().await.unwrap().unwrap().name != "loop-devices.txt" {}
        (client, parts)
    });
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || ended.send(service.wait().unwrap()));
    signal("-TERM", process);
    let status = end.recv_timeout(TIMEOUT);
    if status.is_err() {
        signal("-KILL", process);
    }
    assert!(status.unwrap().success());
    drop(call);
}
