//! Tests of the tool `loopfs` that run on any machine: rejected command lines, messages and exit codes.

use std::process::{Command, Output};

use rstest::rstest;

fn loopfs(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_loopfs")).args(args).output().expect("the tool runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[rstest]
#[case::nothing(&[], "Usage: loopfs")]
#[case::unknown(&["mount"], "unrecognized subcommand 'mount'")]
#[case::size(&["attach", "f", "--offset", "4M"], "\"M\" is not a unit: write 4KiB, 4MiB, 4GiB")]
#[case::overflow(&["attach", "f", "--size-limit", "16EiB"], "the number of bytes does not fit in 64 bits")]
#[case::block_size(&["attach", "f", "--block-size", "1000"], "write 512, 1024, 2048, 4096, match or kernel")]
#[case::index(&["attach", "f", "--index", "loop7"], "write pool, any or a number")]
#[case::id(&["quota", "show", "/", "--id", "0"], "write a number from 1 to 4294967294")]
#[case::no_limit(&["quota", "set", "/", "--id", "7"], "required arguments were not provided")]
#[case::zero(&["quota", "set", "/", "--id", "7", "--bytes", "0"], "0 cannot be a limit; or write `unlimited`")]
#[case::unconfirmed_format(&["data-dir", "format", "/dev/null"], "--yes-format-this-disk")]
#[case::label(&["data-dir", "format", "/dev/null", "--yes-format-this-disk", "--label", "thirteen-byte"], "write 1 to 12 letters")]
fn an_invalid_command_exits_with_2(#[case] args: &[&str], #[case] says: &str) {
    let output = loopfs(args);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text(&output.stderr).contains(says), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "");
}

#[rstest]
#[case::attach(&["attach", "/no/such.img"], "open /no/such.img: No such file or directory")]
#[case::detach(&["detach", "/no/such.img"], "stat /no/such.img: No such file or directory")]
#[case::detach_something_else(&["detach", "/dev/null"], "/dev/null is neither a file nor a loop device nor a binding")]
#[case::quota(&["quota", "show", "/no/such"], "open the directory /no/such: No such file or directory")]
#[case::file(&["quota", "show", "/proc/self/exe", "--id", "7"], "Not a directory")]
#[case::no_quotas(&["quota", "list", "/proc"], "mounted with option prjquota")]
#[case::no_device(&["data-dir", "check", "/no/such"], "check the data disk /no/such: No such file or directory")]
#[case::no_block_device(&["data-dir", "format", "/dev/null", "--yes-format-this-disk"], "/dev/null: it is no block device")]
#[case::no_mount(&["data-dir", "check", "/proc/sys"], "nothing is mounted there")]
#[case::no_disk(&["data-dir", "check", "/proc"], "volumes need XFS on a disk")]
#[case::no_uuid(&["data-dir", "mount", "UUID=1b466c45-bcaa-4ddd-a46c-e65ff913722d", "/proc"], "no block device of this machine")]
#[case::no_mount_point(&["data-dir", "mount", "/dev/null", "/no/such"], "create the directory with `mkdir`")]
#[case::no_identity(&["node-identity", "--root", "/proc/self/fd"], "name the node")]
#[case::no_store(&["store", "list", "/proc/sys"], "open the data directory /proc/sys")]
fn a_failed_operation_exits_with_1(#[case] args: &[&str], #[case] says: &str) {
    for json in [&[][..], &["--json"]] {
        let output = loopfs(&[json, args].concat());
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).starts_with("loopfs: "), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(says), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "", "a failed command prints nothing on standard output");
    }
}

/// The node has no machine id either, and still has its name.
#[test]
fn a_damaged_os_release_is_tolerated() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("etc")).unwrap();
    std::fs::write(root.path().join("etc/hostname"), "Node-1\n").unwrap();
    std::fs::write(root.path().join("etc/os-release"), "PRETTY_NAME='open").unwrap();
    let directory = root.path().to_str().unwrap();
    let output = loopfs(&["--json", "node-identity", "--root", directory]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found, serde_json::json!({"node_name": "node-1", "machine_id": null, "os_name": null}));
    let errors = text(&output.stderr);
    assert!(errors.contains("etc/machine-id") && errors.contains("etc/os-release"), "{errors}");
    let output = loopfs(&["node-identity", "--root", directory]);
    assert_eq!(text(&output.stdout), "node name   node-1\n");
}

#[test]
fn rules_for_the_node_are_printed() {
    let rule = loopfs(&["data-dir", "udev-rule"]);
    assert_eq!(text(&rule.stdout), include_str!("../../examples/udev/59-loopfs.rules"));
    let filter = loopfs(&["--json", "data-dir", "lvm-filter"]);
    let filter: serde_json::Value = serde_json::from_slice(&filter.stdout).unwrap();
    assert_eq!(filter["text"], include_str!("../../examples/lvm/global_filter.conf"));
}

#[test]
fn the_readme_lists_doctors_options() {
    let readme = include_str!("../README.md");
    let section = readme.split("\n## doctor\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(['`', ' ']).next());
    let options: Vec<_> = cells.filter(|name| name.starts_with("--")).collect();
    let help = text(&loopfs(&["doctor", "--help"]).stdout);
    let listed = help.lines().filter_map(|line| line.trim_start().strip_prefix("--")?.split(' ').next());
    let listed: Vec<_> = listed.filter(|name| *name != "json").map(|name| format!("--{name}")).collect();
    assert_eq!(options, listed);
}

/// The exit code is 1 only if something is missing, and the report has every check.
#[test]
fn doctor_exits_with_1_if_missing() {
    // A user other than root sees less, and every check has a result all the same.
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().to_str().unwrap();
    let args = ["doctor", "--data-dir", directory, "--kubelet-dir", directory];
    let output = loopfs(&[&["--json"], &args[..]].concat());
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = found["checks"].as_array().unwrap();
    // Nothing is mounted at a temporary directory, and it is no kubelet's.
    let status = |id: &str| checks.iter().find(|check| check["id"] == id).unwrap()["status"].clone();
    assert_eq!((status("data-dir"), status("propagation")), ("missing".into(), "missing".into()));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let missing = checks.iter().filter(|check| check["status"] == "missing").count();
    assert_eq!(found["missing"], missing);

    let output = loopfs(&args);
    let table = text(&output.stdout);
    assert!(table.starts_with("CHECK "), "{table}");
    assert!(table.contains("\ndata-dir           missing"), "{table}");
    assert!(table.contains("loopfs data-dir format DEVICE"), "{table}");
}

/// Its options, messages and exit codes are those of util-linux.
#[test]
fn losetup_has_its_own_conventions() {
    let unknown = loopfs(&["losetup", "--bogus"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert_eq!(
        text(&unknown.stderr),
        "losetup: unrecognized option '--bogus'\nTry 'losetup --help' for more information.\n"
    );
    let help = loopfs(&["losetup", "--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("--set-capacity DEVICE"));
    assert!(text(&loopfs(&["--help"]).stdout).contains("losetup"));
}
