//! The archive for bug reports.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;

use crate::support::*;

/// Secrets in forms in which components print them. None may be in the archive.
const SECRETS: [&str; 7] = [
    "hunter2-password",
    "hunter2-csi",
    "hunter2-header",
    "hunter2-bearer",
    "SflKxwRJSMeKKF2QT4",
    "MIIEvQhunter2",
    "hunter2-basic",
];

const LOG: &str = r#"2026-01-02T03:04:05Z  INFO agent: mounted volume pvc-1 at /pods/a
time="2026-01-02T03:04:05Z" level=debug msg="GRPC request: {\"secrets\":{\"key\":\"hunter2-csi\"}}"
> Authorization: Bearer hunter2-header
I0102 03:04:05.678901 1 round_trippers.go:1] token Bearer hunter2-bearer
curl -u admin:x --header 'authorization: Basic hunter2-basic'
id eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4 of the pod
password=hunter2-password
-----BEGIN PRIVATE KEY-----
MIIEvQhunter2
-----END PRIVATE KEY-----
2026-01-02T03:04:06Z  INFO agent: the end
"#;

/// It has logs, conditions and state, and an existing file is not overwritten.
#[test]
fn archive_is_complete_without_secrets() {
    let node = Node::start(&[]);
    node.append_log(LOG);
    let path = node.directory().join("report.tar");
    let output = node.dbg(&["bundle", "--output", path.to_str().unwrap()]);
    assert_eq!((output.code, output.stdout.trim()), (Some(0), path.to_str().unwrap()), "{output:?}");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);

    let files = files(&path);
    let log = &files["node-debug/logs/agent.log"];
    assert!(log.contains("mounted volume pvc-1 at /pods/a") && log.contains("the end"), "{log}");
    assert_eq!(log.matches("[redacted]").count(), 9, "{log}");
    for (name, text) in &files {
        for secret in SECRETS {
            assert!(!text.contains(secret), "{name} has {secret}: {text}");
        }
    }
    assert!(files["node-debug/conditions.txt"].contains("plugin-serving: not met: "));
    assert!(files["node-debug/conditions.txt"].contains("node-ready: not evaluated: "));
    assert!(files["node-debug/state/mountinfo.txt"].contains(" /proc "));
    assert!(files["node-debug/state/versions.txt"].contains("Linux version"));
    assert!(files["node-debug/state/quotas.txt"].contains("without --data-dir"));
    assert!(files.contains_key("node-debug/state/loop-devices.txt"));
    assert!(files["node-debug/node-debug.txt"].contains("component agent"));

    // The same again: an existing file is kept.
    node.dbg(&["bundle", "--output", path.to_str().unwrap()]).assert_failed("choose another --output");
}

#[test]
fn secret_in_a_path_is_redacted() {
    let node = Node::start(&["--data-dir=/nonexistent/token=hunter2-path".to_owned()]);
    let path = node.directory().join("report.tar");
    let output = node.dbg(&["bundle", "--output", path.to_str().unwrap()]);
    assert_eq!(output.code, Some(0), "{output:?}");
    let files = files(&path);
    for name in ["node-debug/conditions.txt", "node-debug/state/quotas.txt"] {
        assert!(files[name].contains("/nonexistent/token=[redacted]"), "{name}: {}", files[name]);
    }
    for (name, text) in &files {
        assert!(!text.contains("hunter2-path"), "{name} has the secret: {text}");
    }
}

#[test]
fn failed_bundle_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("report.tar");
    let options = ["bundle", "--output", output.to_str().unwrap()];
    run(&directory.path().join("none.sock"), &options).assert_failed("start node-debug");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    let output = directory.path().join("absent/report.tar");
    let options = ["bundle", "--output", output.to_str().unwrap()];
    run(&directory.path().join("none.sock"), &options).assert_failed("absent is not a directory");
}

fn files(path: &std::path::Path) -> BTreeMap<String, String> {
    let mut archive = tar::Archive::new(File::open(path).unwrap());
    let entry = |entry: std::io::Result<tar::Entry<'_, File>>| {
        let mut entry = entry.unwrap();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        (entry.path().unwrap().display().to_string(), text)
    };
    archive.entries().unwrap().map(entry).collect()
}
