//! Tests of symbolic links, special files, mounts and hard links.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use loopfs::mount::{MountFlags, bind_mount, unmount};
use loopfs::project_tree::{HardLinks, SkipReason, Skipped, SkippedEntry};
use nix::mount::{MsFlags, mount};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::{Fixture, fingerprint, has_file_setattr, make_fifo, project_at};

/// Returns the skipped entries: before Linux 6.17 no system call can tag special files.
fn untagged(special_files: u64) -> Skipped {
    if has_file_setattr() { Skipped::default() } else { Skipped { special_files, ..Skipped::default() } }
}

#[test]
fn symbolic_links_are_tagged_unfollowed() {
    let fixture = Fixture::new(5101);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    symlink(&outside, tree.join("to a directory")).unwrap();
    symlink("../outside/file", tree.join("to a file")).unwrap();
    symlink("nowhere", tree.join("dangling")).unwrap();
    symlink("loop", tree.join("loop")).unwrap();
    symlink("/", tree.join("to the root")).unwrap();
    let before = fingerprint(&outside);
    let report = fixture.tag().unwrap();
    assert_eq!(report.skipped, untagged(5));
    assert_eq!(report.names, 6);
    assert_eq!(fingerprint(&outside), before);
    let charged = if has_file_setattr() { 6 } else { 1 };
    assert_eq!(fixture.charged().1, charged);
    // A symbolic link that is created in a tagged directory is in the project on every kernel.
    symlink("nowhere", tree.join("new")).unwrap();
    assert_eq!(fixture.charged().1, charged + 1);
    let check = fixture.check();
    assert!(check.is_clean(), "{check:?}");
    assert_eq!(check.skipped, untagged(6));
}

#[test]
fn special_files_are_tagged_unopened() {
    let fixture = Fixture::new(5102);
    let tree = fixture.tree();
    make_fifo(&tree.join("fifo"));
    let _listener = UnixListener::bind(tree.join("socket")).unwrap();
    mknod(&tree.join("null"), SFlag::S_IFCHR, Mode::S_IRWXU, makedev(1, 3)).unwrap();
    mknod(&tree.join("block"), SFlag::S_IFBLK, Mode::S_IRWXU, makedev(7, 0)).unwrap();
    mknod(&tree.join("whiteout"), SFlag::S_IFCHR, Mode::S_IRWXU, makedev(0, 0)).unwrap();
    File::create(tree.join("watched")).unwrap();
    let opened = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
    for name in ["fifo", "socket", "null", "block", "whiteout"] {
        opened.add_watch(&tree.join(name), AddWatchFlags::IN_OPEN).unwrap();
    }
    assert_eq!(fixture.tag().unwrap().skipped, untagged(5));
    assert_eq!(fixture.check().skipped, untagged(5));
    assert_eq!(opened.read_events().map(|events| events.len()), Err(nix::errno::Errno::EAGAIN));
    // Opening the FIFO here proves that the watch would have reported an open.
    drop(File::options().read(true).write(true).open(tree.join("fifo")).unwrap());
    assert_eq!(opened.read_events().unwrap().len(), 1);
    assert_eq!(fixture.charged().1, if has_file_setattr() { 7 } else { 2 });
}

#[test]
fn mounts_are_not_entered() {
    let fixture = Fixture::new(5103);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    for name in ["tmpfs", "bound", "plain"] {
        fs::create_dir(tree.join(name)).unwrap();
    }
    File::create(tree.join("bound file")).unwrap();
    fs::write(tree.join("plain/file"), "").unwrap();
    mount(Some("tmpfs"), &tree.join("tmpfs"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    fs::write(tree.join("tmpfs/file"), "").unwrap();
    // The bind mount is of the same file system, so a comparison of device numbers would not detect it.
    let bind = |source, target| {
        bind_mount(File::open(outside.join(source)).unwrap(), &tree.join(target), MountFlags::default())
            .unwrap();
    };
    bind("directory", "bound");
    bind("file", "bound file");
    let before = fingerprint(&outside);
    let report = fixture.tag().unwrap();
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
    assert_eq!(fixture.tag().unwrap().changed, 3, "only the entries that the mounts covered are changed");
}

/// The directory that the bind mount covers is not tagged.
#[test]
fn only_the_mounted_tree_is_tagged() {
    let fixture = Fixture::new(5104);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    fs::write(tree.join("file"), "").unwrap();
    let target = outside.join("directory");
    bind_mount(File::open(&tree).unwrap(), &target, MountFlags::default()).unwrap();
    let report =
        loopfs::project_tree::tag_tree(File::open(&target).unwrap(), fixture.id, HardLinks::Skip, |_| {});
    unmount(&target).unwrap();
    assert_eq!(report.unwrap().changed, 2);
    assert!(fixture.check().is_clean());
    assert_eq!(project_at(&target), 0);
}

/// A file with a hard link outside of the tree is skipped or tagged, as the option says.
#[test]
fn outside_hard_links_follow_the_option() {
    let fixture = Fixture::new(5105);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    fs::create_dir(tree.join("sub")).unwrap();
    fs::hard_link(outside.join("file"), tree.join("sub/linked")).unwrap();
    make_fifo(&outside.join("fifo"));
    fs::hard_link(outside.join("fifo"), tree.join("fifo")).unwrap();
    let before = fingerprint(&outside);
    let report = fixture.tag().unwrap();
    assert_eq!(fingerprint(&outside), before);
    // Before Linux 6.17 the FIFO cannot be tagged, however many names it has.
    let special = if has_file_setattr() { 0 } else { 1 };
    assert_eq!((report.changed, report.skipped.hard_links), (2, 2 - special));
    assert_eq!(report.skipped.special_files, special);
    let linked = SkippedEntry { path: "sub/linked".into(), reason: SkipReason::HardLink };
    assert!(report.skipped.examples.contains(&linked), "{report:?}");
    assert_eq!(fixture.check().other_project, 2 - special);
    let link = fs::hard_link(outside.join("directory/file"), tree.join("sub/late")).unwrap_err();
    assert_eq!(link.raw_os_error(), Some(libc::EXDEV), "the kernel refuses a link into a tagged directory");

    assert_eq!(fixture.tag_with(HardLinks::Tag).unwrap().changed, 2 - special);
    assert_eq!(project_at(&outside.join("file")), 5105);
    assert_eq!(fixture.tag().unwrap().skipped.hard_links, 0);
}
