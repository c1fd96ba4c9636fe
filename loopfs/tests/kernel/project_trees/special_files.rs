//! What is neither a directory nor a regular file, and what is mounted or linked.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use loopfs::ErrorKind;
use loopfs::mount::{MountFlags, bind_mount, unmount};
use loopfs::project_tree::{HardLinks, SkipReason, Skipped, SkippedEntry, SpecialFiles, TagOptions};
use nix::mount::{MsFlags, mount};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::{Scene, fingerprint, has_file_setattr, make_fifo, nothing, project_at};

/// What of them is left out: before Linux 6.17 there is no call for them.
fn untagged(special_files: SpecialFiles) -> Skipped {
    if has_file_setattr() { nothing() } else { Skipped { special_files, ..nothing() } }
}

#[test]
fn links_are_tagged_and_not_followed() {
    let scene = Scene::new(5101);
    let (tree, outside) = (scene.tree(), scene.outside());
    symlink(&outside, tree.join("to a directory")).unwrap();
    symlink("../outside/file", tree.join("to a file")).unwrap();
    symlink("nowhere", tree.join("dangling")).unwrap();
    symlink("loop", tree.join("loop")).unwrap();
    symlink("/", tree.join("to the root")).unwrap();
    let before = fingerprint(&outside);
    let report = scene.tag().unwrap();
    assert_eq!(report.skipped, untagged(SpecialFiles { symlinks: 5, ..SpecialFiles::default() }));
    assert_eq!(report.names, 6);
    assert_eq!(fingerprint(&outside), before);
    let charged = if has_file_setattr() { 6 } else { 1 };
    assert_eq!(scene.charged().1, charged);
    // One that is made in a tagged directory is in the project on every kernel.
    symlink("nowhere", tree.join("new")).unwrap();
    assert_eq!(scene.charged().1, charged + 1);
    let audit = scene.audit();
    assert!(audit.is_clean(), "{audit:?}");
    assert_eq!(audit.skipped, untagged(SpecialFiles { symlinks: 6, ..SpecialFiles::default() }));
    scene.end();
}

#[test]
fn fifos_sockets_and_devices_are_tagged_and_not_opened() {
    let scene = Scene::new(5102);
    let tree = scene.tree();
    make_fifo(&tree.join("fifo"));
    let listener = UnixListener::bind(tree.join("socket")).unwrap();
    mknod(&tree.join("null"), SFlag::S_IFCHR, Mode::S_IRWXU, makedev(1, 3)).unwrap();
    mknod(&tree.join("block"), SFlag::S_IFBLK, Mode::S_IRWXU, makedev(7, 0)).unwrap();
    mknod(&tree.join("whiteout"), SFlag::S_IFCHR, Mode::S_IRWXU, makedev(0, 0)).unwrap();
    File::create(tree.join("watched")).unwrap();
    let opened = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
    for name in ["fifo", "socket", "null", "block", "whiteout"] {
        opened.add_watch(&tree.join(name), AddWatchFlags::IN_OPEN).unwrap();
    }
    let kinds = SpecialFiles { sockets: 1, fifos: 1, devices: 3, ..SpecialFiles::default() };
    assert_eq!(scene.tag().unwrap().skipped, untagged(kinds));
    assert_eq!(scene.audit().skipped, untagged(kinds));
    assert_eq!(opened.read_events().map(|events| events.len()), Err(nix::errno::Errno::EAGAIN));
    // What the watch would have seen.
    drop(File::options().read(true).write(true).open(tree.join("fifo")).unwrap());
    assert_eq!(opened.read_events().unwrap().len(), 1);
    assert_eq!(scene.charged().1, if has_file_setattr() { 7 } else { 2 });
    drop((listener, opened));
    scene.end();
}

#[test]
fn what_is_mounted_in_a_tree_is_not_entered() {
    let scene = Scene::new(5103);
    let (tree, outside) = (scene.tree(), scene.outside());
    for name in ["tmpfs", "bound", "plain"] {
        fs::create_dir(tree.join(name)).unwrap();
    }
    File::create(tree.join("bound file")).unwrap();
    fs::write(tree.join("plain/file"), "").unwrap();
    mount(Some("tmpfs"), &tree.join("tmpfs"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    fs::write(tree.join("tmpfs/file"), "").unwrap();
    // The same file system: a comparison of device numbers would not see it.
    let bind = |source, target| {
        bind_mount(
            File::open(outside.join(source)).unwrap().as_fd(),
            &tree.join(target),
            MountFlags::default(),
        )
        .unwrap();
    };
    bind("directory", "bound");
    bind("file", "bound file");
    let before = fingerprint(&outside);
    let report = scene.tag().unwrap();
    assert_eq!(fingerprint(&outside), before);
    assert_eq!((report.changed, report.names, report.skipped.mounts), (3, 3, 3));
    let mut mounts: Vec<_> =
        report.skipped.examples.iter().map(|example| example.path.to_str().unwrap()).collect();
    mounts.sort_unstable();
    assert_eq!(mounts, ["bound", "bound file", "tmpfs"]);
    assert!(report.skipped.examples.iter().all(|example| example.reason == SkipReason::Mount));
    for name in ["tmpfs", "bound", "bound file"] {
        unmount(&tree.join(name)).unwrap();
    }
    assert_eq!(scene.tag().unwrap().changed, 3, "what the mounts covered");
    scene.end();
}

#[test]
fn a_mounted_tree_is_tagged_through_its_mount_and_no_further() {
    let scene = Scene::new(5104);
    let (tree, outside) = (scene.tree(), scene.outside());
    fs::write(tree.join("file"), "").unwrap();
    let target = outside.join("directory");
    bind_mount(File::open(&tree).unwrap().as_fd(), &target, MountFlags::default()).unwrap();
    let report = loopfs::project_tree::tag_tree(
        File::open(&target).unwrap().as_fd(),
        scene.id,
        &TagOptions::default(),
    );
    unmount(&target).unwrap();
    assert_eq!(report.unwrap().changed, 2);
    assert!(scene.audit().is_clean());
    assert_eq!(project_at(&target), 0);
    scene.end();
}

#[test]
fn a_file_with_a_name_outside_is_left_tagged_or_refused() {
    let scene = Scene::new(5105);
    let (tree, outside) = (scene.tree(), scene.outside());
    fs::create_dir(tree.join("sub")).unwrap();
    fs::hard_link(outside.join("file"), tree.join("sub/linked")).unwrap();
    make_fifo(&outside.join("fifo"));
    fs::hard_link(outside.join("fifo"), tree.join("fifo")).unwrap();
    let before = fingerprint(scene.directory.path());
    let with = |hard_links| TagOptions { hard_links, ..TagOptions::default() };

    let error = scene.tag_with(&with(HardLinks::Refuse)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(fingerprint(scene.directory.path()), before, "refused before anything was changed");

    let before = fingerprint(&outside);
    let report = scene.tag().unwrap();
    assert_eq!(fingerprint(&outside), before);
    // Before Linux 6.17 the FIFO is out of reach, whatever its names.
    let special = if has_file_setattr() { 0 } else { 1 };
    assert_eq!((report.changed, report.skipped.hard_links), (2, 2 - special));
    assert_eq!(report.skipped.special_files.fifos, special);
    let linked = SkippedEntry { path: "sub/linked".into(), reason: SkipReason::HardLink };
    assert!(report.skipped.examples.contains(&linked), "{report:?}");
    assert_eq!(scene.audit().other_project, 2 - special);
    let link = fs::hard_link(outside.join("directory/file"), tree.join("sub/late")).unwrap_err();
    assert_eq!(link.raw_os_error(), Some(libc::EXDEV), "no way into a tagged directory");

    assert_eq!(scene.tag_with(&with(HardLinks::Tag)).unwrap().changed, 2 - special);
    assert_eq!(project_at(&outside.join("file")), 5105);
    assert_eq!(scene.tag_with(&with(HardLinks::Refuse)).unwrap().changed, 0, "it is in the project");
    assert_eq!(scene.tag().unwrap().skipped.hard_links, 0);
    scene.end();
}
