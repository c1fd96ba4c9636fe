//! Runs the programs of `examples`, which `docs/cookbook.md` describes, and checks their effects by the library and the kernel.
//!
//! `LOOPFS_TEST_EXAMPLES` is a directory with the programs.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use loopfs::Bytes;
use loopfs::loop_device::{Access, AttachOptions, BackingFile, LoopControl, LoopDevice};
use loopfs::mount::table as mountinfo;
use loopfs::project_quota::{ProjectId, project_of};
use loopfs::volume_store::{VolumeKind, VolumeSpec};

use crate::environment::{
    Leaks, MIB, directory, id, image, path_from, scratch, snapshot_id, wait_for_deferred_frees, xfs,
};
use crate::fixtures::{TestImage, TestStore, entry_count};

fn program(name: &str) -> Command {
    Command::new(path_from("LOOPFS_TEST_EXAMPLES").join(name))
}

/// Runs a program and returns its exit code, standard output and standard error.
fn output(name: &str, args: &[&str]) -> (i32, String, String) {
    let finished = program(name).args(args).stdin(Stdio::null()).output().expect("the program runs");
    let Output { status, stdout, stderr } = finished;
    (
        status.code().expect("an exit code"),
        String::from_utf8(stdout).expect("UTF-8"),
        String::from_utf8(stderr).expect("UTF-8"),
    )
}

/// Runs a program and returns its standard output. Panics if it fails.
#[track_caller]
fn run(name: &str, args: &[&str]) -> String {
    let (code, stdout, stderr) = output(name, args);
    assert_eq!((code, stderr.as_str()), (0, ""), "{name} {args:?} printed {stdout}");
    stdout
}

/// Runs a program and returns its standard error. Panics if it does not fail.
#[track_caller]
fn failure(name: &str, args: &[&str]) -> String {
    let (code, stdout, stderr) = output(name, args);
    assert_eq!((code, stdout.as_str()), (1, ""), "{name} {args:?} printed {stderr}");
    stderr
}

/// Starts a program and kills it after this time, if it still runs.
fn kill_after(program: &mut Command, time: Duration) {
    let mut killed = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(time);
    killed.kill().unwrap();
    killed.wait().unwrap();
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn project(directory: &Path) -> Option<ProjectId> {
    ProjectId::new(project_of(File::open(directory).unwrap()).unwrap())
}

#[test]
fn invalid_arguments_print_the_usage() {
    let programs = fs::read_dir(path_from("LOOPFS_TEST_EXAMPLES")).expect("the examples");
    let names: Vec<String> =
        programs.map(|program| program.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(names.len(), 9, "{names:?}");
    for name in names {
        let printed = failure(&name, &["argument"; 9]);
        assert!(printed.starts_with(&format!("{name}: usage: {name} ")), "{printed}");
    }
}

#[test]
fn attach_keeps_the_device_until_eof() {
    let _leaks = Leaks::watch();
    let directory = directory();
    let path = directory.path().join("image");
    drop(image(directory.path(), "image", MIB));
    let mut attach =
        program("attach").arg(&path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(attach.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();

    let device = LoopDevice::open_path(Path::new(line.trim_end())).unwrap();
    assert!(device.status().unwrap().direct_io);
    assert_eq!(device.binding().backing, BackingFile::of(File::open(&path).unwrap()).unwrap());
    drop(device);

    drop(attach.stdin.take());
    assert!(attach.wait().unwrap().success());
    assert!(LoopControl::open().unwrap().find(File::open(&path).unwrap()).unwrap().is_empty());
    let absent = directory.path().join("absent");
    let refused = failure("attach", &[text(&absent)]);
    assert!(refused.starts_with(&format!("attach: open {}: No such file", absent.display())), "{refused}");
}

#[test]
fn expand_grows_image_and_device() {
    let TestImage { control, directory, image, .. } = &TestImage::new(MIB);
    let path = directory.path().join("image");
    let device = control.attach(image, &AttachOptions::new(Access::ReadWrite)).unwrap();

    let printed = run("expand", &[text(&path), "4194304"]);
    assert_eq!(printed, format!("{}: {}\n", device.path().display(), Bytes(4 * MIB)));
    assert_eq!(device.status().unwrap().size, Bytes(4 * MIB));
    assert!(failure("expand", &[text(&path), "1048576"]).contains("cannot shrink"));
    assert_eq!(image.metadata().unwrap().len(), 4 * MIB);
}

/// A device is stray after its file was deleted.
#[test]
fn devices_reports_attached_and_stray_devices() {
    let TestImage { control, directory, image, .. } = &TestImage::new(MIB);
    let path = directory.path().join("image");
    let device = control.attach(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let binding = device.binding().to_string();

    let of_file = run("devices", &[text(&path)]);
    assert!(of_file.starts_with(&binding) && of_file.lines().count() == 1, "{of_file}");
    assert!(!run("devices", &[]).contains(&binding), "the file still exists");
    fs::remove_file(&path).unwrap();
    let stray = run("devices", &[]);
    assert!(stray.contains(&binding), "{stray}");
    // Another file of that name is not the file of the device.
    fs::write(&path, "").unwrap();
    let stray = run("devices", &[]);
    assert!(stray.contains(&binding), "{stray}");
}

/// It is killed at eight moments of its run, and then builds all partitions.
#[test]
fn disk_image_is_complete_after_kills() {
    let _leaks = Leaks::watch();
    let directory = directory();
    let [output, first, second] = ["disk.img", "first", "second"].map(|name| directory.path().join(name));
    let contents = [vec![1; MIB as usize], vec![2; 3 * MIB as usize - 100]];
    for (path, content) in [&first, &second].into_iter().zip(&contents) {
        fs::write(path, content).unwrap();
    }
    let args = [text(&output), text(&first), text(&second)];
    let start = Instant::now();
    run("disk_image", &args);
    let whole = start.elapsed();
    fs::remove_file(&output).unwrap();
    for round in 0..8 {
        kill_after(program("disk_image").args(args), whole * round / 8);
    }
    let printed = run("disk_image", &args);
    assert!(printed.contains("p1: ") && printed.contains("p2: "), "{printed}");
    let image = fs::read(&output).unwrap();
    assert_eq!(image.len() as u64, 5 * MIB);
    for (start, content) in [MIB, 2 * MIB].into_iter().zip(&contents) {
        assert!(image[start as usize..].starts_with(content), "the partition at {start}");
    }
    let mut names: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["disk.img", "first", "second"]);
}

#[test]
fn quota_sets_raises_and_removes_limits() {
    let _leaks = Leaks::watch();
    let directory = directory();
    let limited = directory.path();
    run("quota", &["limit", text(limited), "1048576", "100"]);
    let id = project(limited).expect("the directory is in a project");
    let content = vec![1; 2 << 20];
    let refused = fs::write(limited.join("file"), &content).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));

    run("quota", &["limit", text(limited), "4MiB", "100"]);
    fs::write(limited.join("file"), &content).unwrap();
    let printed = run("quota", &["usage", text(limited)]);
    assert!(printed.starts_with(&format!("project {id}: ")), "{printed}");
    assert!(printed.ends_with(", 2 inodes\n"), "{printed}");

    for _ in 0..2 {
        assert_eq!(run("quota", &["unlimit", text(limited)]), "Freed\n");
    }
    assert_eq!(project(limited), None);
}

/// It is killed at five moments of each command, and called again.
#[test]
fn quota_limits_and_frees_after_kills() {
    let _leaks = Leaks::watch();
    let directory = directory();
    let limited = directory.path();
    fs::write(limited.join("file"), "content").unwrap();
    let commands = [&["limit", text(limited), "1MiB", "100"][..], &["unlimit", text(limited)][..]];
    let start = Instant::now();
    run("quota", commands[0]);
    let whole = start.elapsed();
    for round in 0..5 {
        for command in commands.iter().rev() {
            kill_after(program("quota").args(*command), whole * round / 5);
            run("quota", command);
            assert_eq!(project(limited).is_some(), command[0] == "limit", "{command:?} in round {round}");
        }
    }
    let refused = fs::write(limited.join("large"), vec![1; 2 << 20]).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    run("quota", commands[1]);
}

#[test]
fn refusal_names_the_reached_limit() {
    let _leaks = Leaks::watch();
    let directory = directory();
    let limited = directory.path();
    run("quota", &["limit", text(limited), "1048576", "10"]);
    let project = project(limited).expect("the directory is in a project");
    assert!(failure("refusal", &[text(limited), "4096"]).contains("no limit is reached"));

    // In small parts, because XFS may refuse a large write before it has stored any part of it.
    let mut file = File::create(limited.join("file")).unwrap();
    let refused = (0..512).find_map(|_| file.write_all(&[1; 4096]).err());
    assert_eq!(refused.unwrap().raw_os_error(), Some(libc::ENOSPC));
    drop(file);
    let printed = run("refusal", &[text(limited), "1048576"]);
    let (expected, limit) = (format!("project {project} uses "), format!(" of {}: ", Bytes::MIB));
    assert!(printed.starts_with(&expected) && printed.contains(&limit), "{printed}");
    assert_eq!(printed.lines().count(), 1, "{printed}");

    fs::remove_file(limited.join("file")).unwrap();
    wait_for_deferred_frees();
    let refused = (0..10).find_map(|number| File::create(limited.join(number.to_string())).err());
    assert_eq!(refused.unwrap().raw_os_error(), Some(libc::ENOSPC));
    let printed = run("refusal", &[text(limited), "0"]);
    assert!(printed.contains(&format!("project {project} uses 10 inodes of 10 inodes: ")), "{printed}");

    // The root of the file system is in no project.
    let printed = run("refusal", &[text(&xfs()), "1000000000000000"]);
    assert!(printed.contains(&format!("the file system at {}", xfs().display())), "{printed}");
    run("quota", &["unlimit", text(limited)]);
}

/// The program creates, publishes, expands, snapshots and deletes the volume.
#[test]
fn store_manages_a_volume() {
    let (store, target, data) = (TestStore::open(), scratch(), xfs());
    let (volume, snapshot) = (id("cookbook"), snapshot_id("before-upgrade"));
    let run = |args: &[&str]| run("store", &[&[text(&data)], args].concat());
    assert_eq!(run(&["create", "cookbook", "1048576"]), format!("{}\n", Bytes::MIB));

    run(&["publish", "cookbook", text(target.path())]);
    let mounts = mountinfo::read().unwrap();
    let mount = mountinfo::at(&mounts, target.path()).expect("the volume is mounted");
    assert!(mount.has_option("nosuid") && mount.has_option("nodev"), "{:?}", mount.options);
    fs::write(target.path().join("file"), "content").unwrap();
    let refused = failure("store", &[text(&data), "delete", "cookbook"]);
    assert!(refused.contains("in use"), "{refused}");

    assert_eq!(run(&["expand", "cookbook", "4194304"]), format!("{}\n", Bytes(4 * MIB)));
    let size = nix::sys::statvfs::statvfs(target.path()).unwrap();
    assert_eq!(size.blocks() * size.fragment_size(), 4 * MIB);
    run(&["snapshot", "cookbook", "before-upgrade"]);
    assert_eq!(store.snapshot(&snapshot).unwrap().source(), &volume);

    run(&["unpublish", "cookbook", text(target.path())]);
    assert!(mountinfo::at(&mountinfo::read().unwrap(), target.path()).is_none());
    assert_eq!(run(&["delete", "cookbook"]), "true\n");
    assert_eq!(run(&["delete", "cookbook"]), "false\n");
    assert_eq!(run(&["delete-snapshot", "before-upgrade"]), "true\n");
    assert_eq!(run(&["empty-trash"]), "2\n");
    assert!(store.list().unwrap().is_empty() && store.snapshots().unwrap().is_empty());
}

/// The processes that publish and unpublish are killed at four moments each.
#[test]
fn store_publishes_after_kills() {
    let (_store, targets, data) = (TestStore::open(), scratch(), xfs());
    let target = targets.path().join("disk");
    let args = |command| [text(&data), command, "cookbook", text(&target)];
    run("store", &[text(&data), "create-block", "cookbook", "1048576"]);
    let start = Instant::now();
    run("store", &args("publish"));
    let whole = start.elapsed();
    for round in 0..4 {
        for command in ["unpublish", "publish"] {
            kill_after(program("store").args(args(command)), whole * round / 4);
            run("store", &args(command));
        }
    }
    fs::write(&target, "content").unwrap();
    run("store", &args("publish"));
    let published = fs::read(&target).unwrap();
    assert!(published.starts_with(b"content") && published.len() as u64 == MIB);
    assert!(failure("store", &[text(&data), "delete", "cookbook"]).contains("in use"));
    run("store", &args("unpublish"));
    assert!(!target.exists());
}

/// A killed process leaves incomplete volumes, and the program keeps the complete ones.
#[test]
fn recover_removes_only_leftovers() {
    let (store, id) = (TestStore::open(), id("cookbook"));
    store.create(&id, &VolumeSpec::new(VolumeKind::Filesystem, Bytes::MIB)).unwrap();
    // What a process leaves that is killed while it creates a volume.
    fs::create_dir(xfs().join("staging/untagged.0")).unwrap();

    let printed = run("recover", &[text(&xfs())]);
    assert!(printed.starts_with("incomplete volumes removed: 1\n"), "{printed}");
    assert_eq!(entry_count("staging"), 0);
    assert_eq!(store.list().unwrap(), std::slice::from_ref(&id));
    let printed = run("recover", &[text(&xfs())]);
    assert!(printed.starts_with("incomplete volumes removed: 0\n"), "{printed}");

    assert!(store.delete(&id).unwrap());
    assert!(run("recover", &[text(&xfs())]).ends_with("deleted volumes removed: 1\n"));
    let empty = scratch();
    failure("recover", &[text(empty.path())]);
    assert_eq!(fs::read_dir(empty.path()).unwrap().count(), 0, "no store was created");
}

#[test]
fn bind_mount_enforces_read_only() {
    let _leaks = Leaks::watch();
    let (source, target) = (directory(), scratch());
    let arguments = [text(source.path()), text(target.path())];
    let printed = run("bind_mount", &[arguments[0], arguments[1], "ro,nosuid,nodev"]);
    let mounts = mountinfo::read().unwrap();
    let mount = mountinfo::at(&mounts, target.path()).expect("the directory is mounted");
    assert_eq!(printed, format!("{}\n", mount.options.join(",")));
    assert!(["ro", "nosuid", "nodev"].iter().all(|option| mount.has_option(option)), "{printed}");
    let refused = File::create(target.path().join("file")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    File::create(source.path().join("file")).unwrap();

    run("bind_mount", &arguments[1..]);
    assert!(mountinfo::at(&mountinfo::read().unwrap(), target.path()).is_none());
    assert!(failure("bind_mount", &arguments[1..]).contains("nothing is mounted"));
    let refused = failure("bind_mount", &[arguments[0], arguments[1], "ro,rw"]);
    assert!(refused.contains("contradict"), "{refused}");
}
