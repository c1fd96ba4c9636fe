//! Tests of the service and of the program `dbg`, over real sockets. They need no root.

mod bundle;
mod documentation;
mod kubectl;
mod shutdown;
mod slow_reader;
mod support;

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use support::*;

#[test]
fn newest_lines_of_log_are_printed() {
    let node = Node::start(&[]);
    node.append_log("one\ntwo\nthree\nfour without end");
    let print = |options: &[&str]| node.dbg(&[&["logs", COMPONENT], options].concat()).stdout;
    assert_eq!(print(&["--lines", "2"]), "three\nfour without end\n");
    assert_eq!(print(&[]), "one\ntwo\nthree\nfour without end\n");
    let listed = node.dbg(&["logs"]).stdout;
    assert!(listed.starts_with("agent ") && listed.ends_with("/agent.log\n"), "{listed}");
}

#[test]
fn missing_log_is_reported() {
    Node::start(&[]).dbg(&["logs", COMPONENT]).assert_failed("agent.log does not exist");
}

#[test]
fn control_characters_are_escaped() {
    let node = Node::start(&[]);
    node.append_log("\x1b]0;owned\x07\x1b[2J\rtext\n");
    let output = node.dbg(&["logs", COMPONENT]);
    assert_eq!(output.stdout, "\\u{1b}]0;owned\\u{7}\\u{1b}[2J\\u{d}text\n");
}

#[test]
fn following_prints_new_lines() {
    let node = Node::start(&[]);
    node.append_log("before\n");
    let mut dbg = node.command(&["logs", COMPONENT, "--follow"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(dbg.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "before");
    node.append_log("after\n");
    assert_eq!(lines.next().unwrap(), "after");
    dbg.kill().unwrap();
    dbg.wait().unwrap();
}

#[test]
fn following_fails_when_the_service_stops() {
    let node = Node::start(&[]);
    node.append_log("before\n");
    let mut dbg = node
        .command(&["logs", COMPONENT, "--follow"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(dbg.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "before");
    node.stop();
    let output = dbg.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn closed_output_keeps_exit_code() {
    let node = Node::start(&[]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = node.command(&["condition", "get", "plugin-serving"]).stdout(writer).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn missing_service_is_reported_with_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let output = run(&directory.path().join("none.sock"), &["logs", "kubelet"]);
    output.assert_failed("start node-debug on the node, or give its socket with --socket");
    assert!(output.stderr.contains("none.sock"), "{}", output.stderr);
}

#[test]
fn unknown_name_is_refused_with_alternatives() {
    let node = Node::start(&[]);
    node.dbg(&["logs", "kubelet"])
        .assert_failed("there is no component \"kubelet\"; the components are agent");
    node.dbg(&["condition", "get", "quota"])
        .assert_failed("the conditions are plugin-serving, plugin-registered,");
    node.dbg(&["condition", "get", "node-ready"]).assert_failed("needs option --kubeconfig of node-debug");
    node.dbg(&["kubectl", "get", "pods"])
        .assert_failed("start it with --kubeconfig and --kubeconfig-service-account");
}

/// Failures have another exit code.
#[test]
fn unmet_condition_exits_with_1() {
    let node = Node::start(&[]);
    let output = node.dbg(&["condition", "get", "plugin-serving"]);
    assert_eq!(output.code, Some(1));
    assert!(
        output.stdout.starts_with("not met: ") && output.stdout.contains("a.b-reg.sock"),
        "{}",
        output.stdout
    );
    let output = node.dbg(&["condition", "wait", "plugin-serving", "--timeout", "1ms"]);
    assert_eq!(output.code, Some(1));
    let listed = node.dbg(&["condition", "list"]);
    assert_eq!(listed.code, Some(0));
    assert!(listed.stdout.contains("volume-published VOLUME"), "{}", listed.stdout);
}

#[test]
fn second_service_keeps_the_first_socket() {
    let node = Node::start(&[]);
    let error = node.start_another(&[]);
    assert!(error.contains("another process listens on"), "{error}");
    assert_eq!(node.dbg(&["logs"]).code, Some(0));
    let error = node.start_another(&[format!("--log={COMPONENT}=kmsg")]);
    assert!(error.contains("component agent is given twice"), "{error}");
}

#[test]
fn private_socket_is_removed_at_end() {
    use std::os::unix::fs::PermissionsExt;
    let node = Node::start(&[]);
    let socket = node.socket();
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o600, 0o700));
    node.stop();
    assert!(!socket.exists());
}
