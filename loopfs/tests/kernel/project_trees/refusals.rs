//! Tests of operations that the kernel refuses, and of which of these errors end the walk.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};

use loopfs::ErrorKind;
use loopfs::mount::{MountFlags, bind_mount, unmount};
use loopfs::project_quota::assign_project;
use loopfs::project_tree::{HardLinks, SkipReason, Skipped, SkippedEntry, check_tree, tag_tree};
use nix::errno::Errno;
use nix::unistd::{Uid, setfsuid};
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::{Fixture, has_file_setattr, project_at};
use crate::environment::{project, scratch};
use crate::fixtures::{assert_fails, assert_refused};

#[test]
fn tagging_keeps_a_file_immutable() {
    let fixture = Fixture::new(5201);
    let path = fixture.tree().join("immutable");
    fs::write(&path, "").unwrap();
    let file = File::open(&path).unwrap();
    let flags = ioctl_getflags(&file).unwrap();
    ioctl_setflags(&file, flags | IFlags::IMMUTABLE | IFlags::NODUMP).unwrap();
    let report = fixture.tag().unwrap();
    // ioctl_iflags(2) forbids changes of the file and its name. The kernel does not count a project id as
    // either.
    assert_eq!((report.changed, report.skipped), (2, Skipped::default()));
    assert_eq!(project_at(&path), 5201);
    assert_eq!(ioctl_getflags(&file).unwrap(), flags | IFlags::IMMUTABLE | IFlags::NODUMP);
    ioctl_setflags(&file, flags).unwrap();
}

/// The tree can still be checked through the mount.
#[test]
fn tagging_a_read_only_mount_fails() {
    let fixture = Fixture::new(5202);
    fs::write(fixture.tree().join("file"), "").unwrap();
    let target = scratch();
    let flags = MountFlags { read_only: true, ..MountFlags::default() };
    bind_mount(File::open(fixture.tree()).unwrap(), target.path(), flags).unwrap();
    let root = File::open(target.path()).unwrap();
    assert_refused(
        tag_tree(&root, fixture.id, HardLinks::Skip, |_| {}),
        ErrorKind::ReadOnly,
        Some(Errno::EROFS),
    );
    assert_eq!(check_tree(&root, fixture.id, |_| {}).unwrap().other_project, 2);
    drop(root);
    unmount(target.path()).unwrap();
}

/// Runs `act` as a user without capabilities over files, in a thread of its own, because Linux keeps credentials per thread.
fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> T + Send) -> T {
    let as_other = || {
        setfsuid(Uid::from_raw(uid));
        act()
    };
    std::thread::scope(|scope| scope.spawn(as_other).join().unwrap())
}

/// Without capabilities, the owner cannot tag the files of others.
#[test]
fn an_unprivileged_owner_tags_own_files() {
    const OWNER: u32 = 1000;
    let fixture = Fixture::new(5203);
    let tree = fixture.tree();
    for name in ["own", "theirs, readable", "theirs"] {
        fs::write(tree.join(name), "").unwrap();
    }
    fs::create_dir(tree.join("their directory")).unwrap();
    fs::write(tree.join("their directory/file"), "").unwrap();
    fs::set_permissions(tree.join("theirs"), Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(tree.join("their directory"), Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(fixture.directory.path(), Permissions::from_mode(0o755)).unwrap();
    chown(&tree, Some(OWNER), None).unwrap();
    chown(tree.join("own"), Some(OWNER), None).unwrap();

    let report = as_user(OWNER, || fixture.tag()).unwrap();
    assert_eq!((report.changed, report.skipped.refused), (2, 3));
    let refused = |path: &str, errno| SkippedEntry { path: path.into(), reason: SkipReason::Refused(errno) };
    // With file_setattr(2) the file is not opened, so that only its owner matters.
    let unreadable = if has_file_setattr() { libc::EPERM } else { libc::EACCES };
    let mut examples = report.skipped.examples;
    examples.sort_by(|one, other| one.path.cmp(&other.path));
    assert_eq!(
        examples,
        [
            refused("their directory", libc::EACCES),
            refused("theirs", unreadable),
            refused("theirs, readable", libc::EPERM)
        ]
    );

    let outside = File::open(fixture.outside()).unwrap();
    assert_refused(
        as_user(OWNER, || tag_tree(&outside, fixture.id, HardLinks::Skip, |_| {})),
        ErrorKind::PermissionDenied,
        Some(Errno::EPERM),
    );
    let closed = File::open(tree.join("their directory")).unwrap();
    assert_refused(
        as_user(OWNER, || check_tree(&closed, fixture.id, |_| {})),
        ErrorKind::PermissionDenied,
        Some(Errno::EACCES),
    );
}

#[test]
fn tagging_ends_despite_id_changes() {
    let fixture = Fixture::new(5204);
    fs::create_dir(fixture.tree().join("sub")).unwrap();
    let sub = File::open(fixture.tree().join("sub")).unwrap();
    let other = project(5205);
    let mut passes = 0;
    let error = tag_tree(File::open(fixture.tree()).unwrap(), fixture.id, HardLinks::Skip, |report| {
        passes = report.passes;
        assign_project(&sub, other).unwrap();
    })
    .unwrap_err();
    assert_eq!((error.kind(), passes), (ErrorKind::Busy, 8));
}

/// The file system must support project ids.
#[test]
fn tagging_needs_a_suitable_directory() {
    let id = project(5206);
    let tmpfs = scratch();
    let tagged = tag_tree(File::open(tmpfs.path()).unwrap(), id, HardLinks::Skip, |_| {});
    assert_fails(tagged, ErrorKind::Unsupported);
    let path = tmpfs.path().join("file");
    fs::write(&path, "").unwrap();
    let error = tag_tree(File::open(&path).unwrap(), id, HardLinks::Skip, |_| {}).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOTDIR));
}
