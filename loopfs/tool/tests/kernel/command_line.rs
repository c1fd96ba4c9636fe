//! Tests of the commands for loop devices, quotas and stores.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use loopfs::loop_device::{Access, AttachOptions, LoopControl, LoopDevice};
use loopfs::project_quota::{Limits, ProjectId, assign_project, project_of};
use loopfs::volume_store::{Annotations, VolumeKind, VolumeSpec};
use loopfs::{Bytes, Inodes, test_support};
use rustix::fs::{XattrFlags, setxattr};
use serde_json::{Value, json};

use crate::environment::{Leaks, directory, id, image, path_from, quota, store, xfs, xfs_without_quota};

const MIB: u64 = 1 << 20;

struct Tool {
    path: PathBuf,
}

impl Tool {
    fn find() -> Self {
        Self { path: path_from("LOOPFS_TEST_TOOL") }
    }

    fn output(&self, args: &[&str]) -> Output {
        Command::new(&self.path).args(args).output().expect("the tool runs")
    }

    /// Runs the tool and returns its exit code, standard output and standard error.
    fn run(&self, args: &[&str]) -> (i32, String, String) {
        let Output { status, stdout, stderr } = self.output(args);
        (
            status.code().expect("an exit code"),
            String::from_utf8(stdout).expect("UTF-8"),
            String::from_utf8(stderr).expect("UTF-8"),
        )
    }

    /// Runs the tool without `--json` and returns its output. Panics if it fails or prints to standard error.
    fn text(&self, args: &[&str]) -> String {
        let (code, stdout, stderr) = self.run(args);
        assert_eq!((code, stderr.as_str()), (0, ""), "{args:?} printed {stdout}");
        stdout
    }

    /// Runs the tool with `--json` and returns its exit code and the document that it printed.
    fn json(&self, args: &[&str]) -> (i32, Value) {
        let (code, stdout, stderr) = self.run(&[&["--json"], args].concat());
        assert_eq!(stderr, "", "{args:?}");
        (code, serde_json::from_str(&stdout).expect("one JSON document"))
    }

    /// Runs the tool and returns what it printed on standard error. Panics if it does not fail.
    fn failure(&self, args: &[&str]) -> String {
        let (code, stdout, stderr) = self.run(args);
        assert_eq!((code, stdout.as_str()), (1, ""), "{args:?} printed {stderr}");
        stderr
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Returns the words of the line that starts with `first`.
fn words<'a>(table: &'a str, first: &str) -> Vec<&'a str> {
    let line = table.lines().find(|line| line.split_whitespace().next() == Some(first));
    line.unwrap_or_else(|| panic!("no line {first} in {table}")).split_whitespace().collect()
}

#[test]
fn a_file_is_attached_and_detached() {
    let _leaks = Leaks::watch();
    let (tool, directory) = (Tool::find(), directory());
    image(directory.path(), "image", 8 * MIB);
    let path = directory.path().join("image");

    let device = tool.text(&["attach", text(&path)]);
    let device = device.trim_end();
    assert!(device.starts_with("/dev/loop"), "{device}");
    let bound = LoopDevice::open_path(Path::new(device)).unwrap();
    let status = bound.status().unwrap();
    assert_eq!((status.size, status.block_size, status.direct_io), (Bytes(8 * MIB), 512, true));
    drop(bound);

    let listed = tool.text(&["list"]);
    let backing = status.binding.backing;
    assert_eq!(
        words(&listed, device)[..7],
        [device, "8MiB", "512", "yes", "rw", "no", &format!("{}/{}", backing.device, backing.inode)]
    );
    assert!(listed.contains(&status.binding.to_string()), "{listed}");
    let (code, all) = tool.json(&["list", "--all"]);
    let devices = all["devices"].as_array().unwrap();
    let json = devices.iter().find(|json| json["device"] == device).expect("the device");
    assert_eq!(code, 0);
    assert_eq!(
        *json,
        json!({
            "index": status.binding.index,
            "device": device,
            "size_bytes": 8 * MIB,
            "block_size_bytes": 512,
            "direct_io": true,
            "auto_clear": false,
            "access": "rw",
            "label": status.label,
            "file": { "device": backing.device.to_string(), "inode": backing.inode },
            "offset_bytes": 0,
            "size_limit_bytes": null,
            "disk_sequence": status.binding.disk_sequence,
            "binding": status.binding.to_string(),
        })
    );
    assert!(status.label.starts_with(text(&xfs())), "{}", status.label);

    let refused = tool.failure(&["attach", text(&path)]);
    assert!(refused.contains("attached already") && refused.contains("--ensure"), "{refused}");
    assert_eq!(tool.json(&["attach", text(&path), "--ensure"]), (0, json.clone()));
    let refused = tool.failure(&["attach", text(&path), "--ensure", "--direct-io", "off"]);
    assert!(refused.contains("buffered I/O requested, direct I/O granted"), "{refused}");

    assert_eq!(tool.text(&["detach", text(&path)]), format!("{device} is detached\n"));
    let refused = tool.failure(&["detach", text(&path)]);
    assert!(refused.contains("the file is attached to no loop device"), "{refused}");
    let refused = tool.failure(&["detach", &status.binding.to_string()]);
    assert!(refused.contains("bound to no file"), "{refused}");
    directory.close().unwrap();
}

#[test]
fn attach_grants_every_property() {
    let _leaks = Leaks::watch();
    let (tool, directory) = (Tool::find(), directory());
    image(directory.path(), "image", 8 * MIB);
    let path = directory.path().join("image");
    let requested =
        ["attach", text(&path), "--read-only", "--offset=1MiB", "--size-limit=2MiB", "--direct-io=off"];
    let more = ["--block-size=4KiB", "--label=mine", "--index=70000"];
    let (code, device) = tool.json(&[&requested[..], &more].concat());
    assert_eq!(code, 0);
    for (field, expected) in [
        ("device", json!("/dev/loop70000")),
        ("access", json!("ro")),
        ("offset_bytes", json!(MIB)),
        ("size_limit_bytes", json!(2 * MIB)),
        ("size_bytes", json!(2 * MIB)),
        ("direct_io", json!(false)),
        ("block_size_bytes", json!(4096)),
        ("label", json!("mine")),
    ] {
        assert_eq!(device[field], expected, "{field} of {device}");
    }
    // Detaches the device by its binding, which identifies this attachment.
    let binding = device["binding"].as_str().unwrap();
    assert_eq!(
        tool.json(&["detach", binding]),
        (0, json!({ "outcome": "gone", "detached": [binding], "deferred": [] }))
    );
    let refused = tool.failure(&["attach", text(&path), "--offset=100"]);
    assert!(refused.contains("offset 100 is not a multiple of 512"), "{refused}");
    directory.close().unwrap();
}

#[test]
fn a_used_device_detaches_later() {
    let _leaks = Leaks::watch();
    let (tool, directory) = (Tool::find(), directory());
    let file = image(directory.path(), "image", MIB);
    let path = directory.path().join("image");
    let control = LoopControl::open().unwrap();
    let user = control.attach(file.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    let (device, binding) = (user.path(), user.binding().to_string());

    let (code, printed) = tool.json(&["detach", text(&device), "--wait", "1"]);
    assert_eq!((code, printed), (1, json!({ "outcome": "deferred", "detached": [], "deferred": [binding] })));
    let (code, printed, stderr) = tool.run(&["detach", text(&path)]);
    assert_eq!((code, stderr.as_str()), (1, ""), "a deferred detach is a result and prints no error");
    assert!(
        printed
            .contains("is in use, and the kernel detaches it at its last close: wait for that with --wait"),
        "{printed}"
    );

    // The device may be that of a mount, with which it should end.
    let refused = tool.failure(&["attach", "--ensure", text(&path)]);
    assert!(refused.contains("detaches it at its last close"), "{refused}");
    drop(user);
    let refused = tool.failure(&["detach", text(&device)]);
    assert!(refused.contains("bound to no file"), "{refused}");
    directory.close().unwrap();
}

#[test]
fn limits_are_set_shown_and_listed() {
    let _leaks = Leaks::watch();
    let (tool, directory) = (Tool::find(), directory());
    let (path, project) = (text(directory.path()), ProjectId::new(4901).unwrap());

    let refused = tool.failure(&["quota", "show", path]);
    assert!(refused.contains("is in no project") && refused.contains("--id"), "{refused}");
    let printed = tool.text(&["quota", "set", path, "--id=4901", "--bytes=4MiB", "--inodes=100"]);
    assert_eq!(words(&printed, "bytes"), ["bytes", "0B", "4MiB"]);
    assert_eq!(words(&printed, "inodes"), ["inodes", "0", "100"]);
    assign_project(File::open(path).unwrap(), project).unwrap();

    // Without `--id` the command uses the directory's project. It sets only one of the limits.
    let set = tool.json(&["quota", "set", path, "--bytes=8MiB"]);
    let expected = json!({
        "id": 4901,
        "enforced": true,
        "bytes": { "used": 0, "hard": 8 * MIB },
        "inodes": { "used": 1, "hard": 100 },
    });
    assert_eq!(set, (0, expected.clone()));
    assert_eq!(tool.json(&["quota", "show", path]), (0, expected.clone()));
    let (code, listed) = tool.json(&["quota", "list", text(&xfs())]);
    assert_eq!((code, &listed["enforced"]), (0, &json!(true)));
    assert!(listed["projects"].as_array().unwrap().contains(&expected), "{listed}");
    let listed = tool.text(&["quota", "list", text(&xfs())]);
    assert_eq!(words(&listed, "4901"), ["4901", "0B", "8MiB", "1", "100"]);

    directory.close().unwrap();
    let root = File::open(xfs()).unwrap();
    quota(&root).finish_inactivation(project).unwrap();
    let cleared =
        tool.text(&["quota", "set", text(&xfs()), "--id=4901", "--bytes=unlimited", "--inodes=unlimited"]);
    assert_eq!(words(&cleared, "bytes"), ["bytes", "0B", "-"]);
    assert_eq!(quota(&root).usage(project).unwrap(), None);
    let refused = tool.failure(&["quota", "list", text(&xfs_without_quota())]);
    assert!(refused.contains("prjquota"), "{refused}");
}

#[test]
fn tag_assigns_and_check_finds_strays() {
    let _leaks = Leaks::watch();
    let (tool, directory) = (Tool::find(), directory());
    let (path, project) = (text(directory.path()), ProjectId::new(4903).unwrap());
    std::fs::create_dir(directory.path().join("below")).unwrap();
    let file = directory.path().join("below/file\u{1b}[2J");
    std::fs::write(&file, [1; 4096]).unwrap();

    tool.text(&["quota", "set", path, "--id=4903", "--bytes=1MiB", "--inodes=100"]);
    let (code, tagged) = tool.json(&["quota", "tag", path, "--id=4903"]);
    assert_eq!((code, &tagged["changed"], &tagged["names"]), (0, &json!(3), &json!(3)), "{tagged}");
    let shown = tool.text(&["quota", "show", path]);
    assert_eq!(words(&shown, "bytes")[..2], ["bytes", "4KiB"]);
    assert_eq!(words(&shown, "inodes")[..2], ["inodes", "3"]);
    let checked = tool.text(&["quota", "check", path]);
    assert_eq!(
        checked,
        "project 4903: 3 names, 2 of them directories; 0 with another id, 0 directories without project inheritance\n"
    );

    test_support::set_project(
        File::open(directory.path().join("below")).unwrap(),
        ProjectId::new(4904).unwrap(),
    )
    .unwrap();
    let (code, checked) = tool.json(&["quota", "check", path]);
    assert_eq!(
        (code, &checked["clean"], &checked["other_project"]),
        (1, &json!(false), &json!(1)),
        "{checked}"
    );
    assert_eq!(checked["strays"], json!([{ "path": "below", "id": 4904, "inherits": true }]));
    // In a check for another project everything else is a stray. The tool escapes control characters in the
    // printed names.
    let (code, printed, stderr) = tool.run(&["quota", "check", path, "--id=4904"]);
    assert_eq!((code, stderr.as_str()), (1, ""));
    assert!(printed.contains("2 with another id") && printed.contains("below/file\\u{1b}[2J"), "{printed}");
    assert!(!printed.contains('\u{1b}'), "{printed}");

    // A file with two names is skipped and reported.
    std::fs::hard_link(&file, directory.path().join("below/link")).unwrap_err();
    assert_eq!(tool.json(&["quota", "assign", path, "--id=4903"]).0, 0);
    std::fs::hard_link(&file, directory.path().join("below/link")).unwrap();
    let (code, tagged) = tool.json(&["quota", "tag", path, "--id=4904"]);
    assert_eq!((code, &tagged["left_out"]["hard_links"]), (1, &json!(2)), "{tagged}");
    assert_eq!(tool.json(&["quota", "tag", path, "--id=4904", "--hard-links=tag"]).0, 0);
    assert_eq!(tool.json(&["quota", "check", path]).0, 0);

    directory.close().unwrap();
    let root = File::open(xfs()).unwrap();
    quota(&root).finish_inactivation(project).unwrap();
    quota(&root).clear_limits(project).unwrap();
}

#[test]
fn volumes_are_listed_with_their_conditions() {
    let _leaks = Leaks::watch();
    let (tool, data, store) = (Tool::find(), xfs(), store());
    let data = text(&data);
    let (directory, image) = (id("cli-directory"), id("cli-image"));
    store.create(&directory, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(4 * MIB))).unwrap();
    store.create(&image, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();

    let listed = tool.text(&["store", "list", data]);
    assert_eq!(
        words(&listed, "cli-directory"),
        ["cli-directory", "-", "-", "Filesystem", "4MiB", "0B", "4MiB", "256", "1", "healthy"]
    );
    assert_eq!(
        words(&listed, "cli-image"),
        ["cli-image", "-", "-", "Block", "1MiB", "1MiB", "0B", "-", "-", "healthy"]
    );

    let opened = store.volume(&directory).unwrap();
    let project = ProjectId::new(project_of(directory_of(data, "cli-directory")).unwrap()).unwrap();
    test_support::set_project(directory_of(data, "cli-directory"), ProjectId::new(4902).unwrap()).unwrap();
    let (code, json) = tool.json(&["store", "list", data]);
    assert_eq!(code, 0);
    assert_eq!(json["filesystem_uuid"], store.filesystem_uuid().to_string());
    let volumes = json["volumes"].as_array().unwrap();
    let changed = volumes.iter().find(|volume| volume["id"] == "cli-directory").unwrap();
    assert_eq!((&changed["healthy"], &changed["capacity_bytes"]), (&json!(false), &json!(4 * MIB)));
    assert!(changed["problem"].as_str().unwrap().contains("to 4902"), "{changed}");
    assert_eq!(
        *volumes.iter().find(|volume| volume["id"] == "cli-image").unwrap(),
        json!({
            "id": "cli-image",
            "kind": "Block",
            "annotations": {},
            "pending": false,
            "capacity_bytes": MIB,
            "used_bytes": MIB,
            "available_bytes": 0,
            "inodes": null,
            "healthy": true,
            "problem": null,
        })
    );
    test_support::set_project(directory_of(data, "cli-directory"), project).unwrap();

    // A volume whose limits were removed does not hide the other volumes.
    let root = File::open(data).unwrap();
    quota(&root).clear_limits(project).unwrap();
    let listed = tool.text(&["store", "list", data]);
    assert_eq!(words(&listed, "cli-directory")[..2], ["cli-directory", "-"]);
    assert!(listed.contains("no limits") && listed.contains("cli-image"), "{listed}");
    quota(&root).set_limits(project, Limits::hard(Bytes(4 * MIB), Inodes(2048))).unwrap();
    drop(opened);

    let space = store.space().unwrap();
    let (code, room) = tool.json(&["store", "space", data]);
    assert_eq!((code, &room["total_bytes"]), (0, &json!(space.total.0)));
    let available = room["available_bytes"].as_u64().unwrap();
    assert!(available > 0 && available <= space.total.0, "{room}");
    assert!(tool.text(&["store", "space", data]).contains(&store.filesystem_uuid().to_string()));

    store.delete(&directory).unwrap();
    store.delete(&image).unwrap();
    store.empty_trash().unwrap();
}

#[test]
fn invalid_annotations_hide_no_pending_volumes() {
    let _leaks = Leaks::watch();
    let (tool, data, store) = (Tool::find(), xfs(), store());
    let annotations = Annotations::new([("claim", "shop/data"), ("class", "fast")]).unwrap();
    let pending =
        VolumeSpec { annotations, pending: true, ..VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB)) };
    for name in ["cli-a", "cli-b"] {
        store.create(&id(name), &pending).unwrap();
    }
    let name = "trusted.loopfs.annotations";
    setxattr(data.join("volumes/cli-a"), name, b"claim=a\nb uid", XattrFlags::empty()).unwrap();
    let (_, listed, _) = tool.run(&["store", "list", text(&data)]);
    let row = |name| words(&listed, name).join(" ");
    assert!(row("cli-a").contains("is invalid"), "{listed}");
    assert!(row("cli-b").contains("shop/data") && row("cli-b").contains("pending"), "{listed}");
    for name in ["cli-a", "cli-b"] {
        assert!(store.delete(&id(name)).unwrap(), "{name}");
    }
    store.empty_trash().unwrap();
}

#[test]
fn one_command_limits_a_directory() {
    let (tool, directory) = (Tool::find(), directory());
    let path = text(directory.path());
    std::fs::write(directory.path().join("file"), [7; 4096]).unwrap();
    let printed = tool.text(&["quota", "limit", path, "--bytes=4MiB"]);
    assert!(printed.ends_with(": 1 changed of 2 names, 1 of them directories\n"), "{printed}");
    assert_eq!(words(&tool.text(&["quota", "show", path]), "bytes")[2], "4MiB");
    assert_eq!(tool.text(&["quota", "unlimit", path]), "");
    let refused = tool.failure(&["quota", "show", path]);
    assert!(refused.contains("is in no project"), "{refused}");
}

fn directory_of(data: &str, volume: &str) -> File {
    File::open(PathBuf::from(data).join("volumes").join(volume)).unwrap()
}

#[test]
fn listing_creates_no_store() {
    let (tool, data) = (Tool::find(), xfs());
    drop(store());
    let format = data.join(".loopfs/format");
    let name = data.file_name().unwrap().to_str().unwrap();
    let record = data.with_file_name(format!("{name}.filesystem-uuid"));
    let (kept, aside) = (std::fs::read(&format).unwrap(), std::fs::read(&record).unwrap());
    std::fs::remove_file(&format).unwrap();
    let refused = tool.failure(&["store", "list", text(&data)]);
    assert!(refused.contains("no longer exists"), "the recorded store is missing: {refused}");
    std::fs::remove_file(&record).unwrap();
    let refused = tool.failure(&["store", "list", text(&data)]);
    assert!(refused.contains("there is no store"), "{refused}");
    assert!(!format.exists() && !record.exists());

    // A store whose file system is mounted for the first time somewhere can be listed.
    std::fs::write(&format, kept).unwrap();
    assert_eq!(tool.json(&["store", "list", text(&data)]).0, 0);
    assert!(!record.exists());
    std::fs::write(&record, aside).unwrap();
    store().verify().unwrap();

    let refused = tool.failure(&["store", "space", text(&xfs_without_quota())]);
    assert!(refused.contains("prjquota"), "{refused}");
}

/// The result is that of the absolute path.
#[test]
fn a_relative_directory_is_checked() {
    let _leaks = Leaks::watch();
    drop(store());
    let tool = Tool::find();
    let space_in = |current: &Path, directory: &str| {
        let output =
            Command::new(&tool.path).current_dir(current).args(["store", "space", directory]).output();
        let output = output.expect("the tool runs");
        (output.status.success(), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    let (parent, name) = (xfs().parent().unwrap().to_owned(), xfs().file_name().unwrap().to_owned());
    assert_eq!(space_in(&parent, text(Path::new(&name))), (true, String::new()));
    assert_eq!(space_in(&xfs(), "."), (true, String::new()));
    assert_eq!(space_in(&xfs(), "volumes/.."), (true, String::new()));

    // A plain directory of a mounted XFS. A path such as `.` does not contain the parent's name.
    let plain = directory();
    let name = text(Path::new(plain.path().file_name().unwrap())).to_owned();
    for (current, directory) in
        [(xfs(), name.as_str()), (plain.path().to_owned(), "."), (xfs(), text(plain.path()))]
    {
        let (success, stderr) = space_in(&current, directory);
        assert!(!success && stderr.contains("nothing is mounted there"), "{directory}: {stderr}");
    }
    let (success, stderr) = space_in(&xfs(), "/");
    assert!(!success && stderr.contains("the root directory"), "{stderr}");
    assert_eq!(std::fs::read_dir(plain.path()).unwrap().count(), 0);
    plain.close().unwrap();
}
