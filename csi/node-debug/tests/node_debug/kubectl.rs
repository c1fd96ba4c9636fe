//! Kubeconfigs that the service requests from an API server. The API server is a stand-in that responds to one request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::thread::{self, JoinHandle};

use crate::support::*;

const OWN_TOKEN: &str = "the-token-of-the-service-itself";
const ISSUED_TOKEN: &str = "the-token-that-was-issued";

/// Responds to one request. Returns its first line and its body.
fn api_server() -> (String, JoinHandle<(String, String)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let serving = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream);
        let mut first = String::new();
        reader.read_line(&mut first).unwrap();
        let mut length = 0;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).unwrap();
            let header = header.trim().to_lowercase();
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if header.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let response = format!(
            r#"{{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","metadata":{{}},"spec":{{"audiences":[]}},
               "status":{{"token":"{ISSUED_TOKEN}","expirationTimestamp":"2026-01-02T03:04:05Z"}}}}"#
        );
        let head = format!(
            "HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            response.len()
        );
        reader.get_mut().write_all([head, response].concat().as_bytes()).unwrap();
        (first, String::from_utf8(body).unwrap())
    });
    (address, serving)
}

fn node(server: &str) -> (Node, tempfile::TempDir) {
    let scratch = tempfile::tempdir().unwrap();
    let kubeconfig = format!(
        r#"{{"apiVersion":"v1","kind":"Config","current-context":"c",
            "clusters":[{{"name":"c","cluster":{{"server":"{server}"}}}}],
            "users":[{{"name":"c","user":{{"token":"{OWN_TOKEN}"}}}}],
            "contexts":[{{"name":"c","context":{{"cluster":"c","user":"c"}}}}]}}"#
    );
    let path = write(&scratch.path().join("kubeconfig"), &kubeconfig);
    let node = Node::start(&[
        format!("--kubeconfig={path}"),
        "--kubeconfig-service-account=debug/node-debug-viewer".to_owned(),
    ]);
    (node, scratch)
}

/// Prints the kubeconfig, and the arguments, in place of kubectl.
const SCRIPT: &str = "cat \"$KUBECONFIG\"; echo \"arguments: $*\"; exit 7";

/// The client leaves no temporary file.
#[test]
fn kubectl_gets_token_of_allowed_account() {
    let (server, serving) = api_server();
    let (node, scratch) = node(&server);
    let mut command = node.command(&["kubectl", "--kubectl", "sh", "-c", SCRIPT, "kubectl", "get", "pods"]);
    // Where a temporary file would be.
    let temporary = scratch.path().join("tmp");
    std::fs::create_dir(&temporary).unwrap();
    let output = command.env("TMPDIR", &temporary).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(7), "{stdout} {}", String::from_utf8_lossy(&output.stderr));
    assert!(
        stdout.contains(ISSUED_TOKEN) && stdout.contains(&server) && !stdout.contains(OWN_TOKEN),
        "{stdout}"
    );
    assert!(stdout.ends_with("arguments: get pods\n"), "{stdout}");
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);

    let (request, body) = serving.join().unwrap();
    assert!(
        request.starts_with("POST /api/v1/namespaces/debug/serviceaccounts/node-debug-viewer/token"),
        "{request}"
    );
    assert!(body.contains("\"expirationSeconds\":600"), "{body}");
}

#[test]
fn unreachable_api_server_is_reported() {
    let (node, _scratch) = node("http://127.0.0.1:1");
    node.dbg(&["kubectl", "version"])
        .assert_failed("request a token for service account debug/node-debug-viewer");
}
