//! What the kernel refuses, and what of it ends the walk.

use std::fs::{self, File, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown};

use loopfs::ErrorKind;
use loopfs::mount::{MountFlags, bind_mount, unmount};
use loopfs::project_quota::{ProjectId, assign_project};
use loopfs::project_tree::{SkipReason, SkippedEntry, TagOptions, audit_tree, tag_tree, tag_tree_reporting};
use nix::unistd::{Uid, setfsuid};
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::{Scene, has_file_setattr, nothing, project_at};
use crate::environment::scratch;

#[test]
fn an_immutable_file_is_tagged_as_any_other_and_stays_immutable() {
    let scene = Scene::new(5201);
    let path = scene.tree().join("immutable");
    fs::write(&path, "").unwrap();
    let file = File::open(&path).unwrap();
    let flags = ioctl_getflags(&file).unwrap();
    ioctl_setflags(&file, flags | IFlags::IMMUTABLE | IFlags::NODUMP).unwrap();
    let report = scene.tag().unwrap();
    // ioctl_iflags(2) forbids changes to the file and its name; to the kernel a project id is neither.
    assert_eq!((report.changed, report.skipped), (2, nothing()));
    assert_eq!(project_at(&path), 5201);
    assert_eq!(ioctl_getflags(&file).unwrap(), flags | IFlags::IMMUTABLE | IFlags::NODUMP);
    ioctl_setflags(&file, flags).unwrap();
    drop(file);
    scene.end();
}

#[test]
fn a_read_only_mount_can_be_audited_and_not_tagged() {
    let scene = Scene::new(5202);
    fs::write(scene.tree().join("file"), "").unwrap();
    let target = scratch();
    let flags = MountFlags { read_only: true, ..MountFlags::default() };
    bind_mount(File::open(scene.tree()).unwrap().as_fd(), target.path(), flags).unwrap();
    let root = File::open(target.path()).unwrap();
    let error = tag_tree(root.as_fd(), scene.id, &TagOptions::default()).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::ReadOnly, Some(libc::EROFS)));
    assert_eq!(audit_tree(root.as_fd(), scene.id).unwrap().other_project, 2);
    drop(root);
    unmount(target.path()).unwrap();
    scene.end();
}

/// As a user without capabilities over files; of the calling thread alone, so in one of its own.
fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            setfsuid(Uid::from_raw(uid));
            act()
        });
        acting.join().unwrap()
    })
}

#[test]
fn an_owner_without_capabilities_tags_what_is_its_own() {
    const OWNER: u32 = 1000;
    let scene = Scene::new(5203);
    let tree = scene.tree();
    for name in ["own", "theirs, readable", "theirs"] {
        fs::write(tree.join(name), "").unwrap();
    }
    fs::create_dir(tree.join("their directory")).unwrap();
    fs::write(tree.join("their directory/file"), "").unwrap();
    fs::set_permissions(tree.join("theirs"), Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(tree.join("their directory"), Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(scene.directory.path(), Permissions::from_mode(0o755)).unwrap();
    chown(&tree, Some(OWNER), None).unwrap();
    chown(tree.join("own"), Some(OWNER), None).unwrap();

    let report = as_user(OWNER, || scene.tag()).unwrap();
    assert_eq!((report.changed, report.skipped.refused), (2, 3));
    let refused = |path: &str, errno| SkippedEntry { path: path.into(), reason: SkipReason::Refused(errno) };
    // With file_setattr(2) a file is not opened, so that only its owner matters.
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

    let outside = File::open(scene.outside()).unwrap();
    let error = as_user(OWNER, || tag_tree(outside.as_fd(), scene.id, &TagOptions::default())).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::PermissionDenied, Some(libc::EPERM)));
    let closed = File::open(tree.join("their directory")).unwrap();
    let error = as_user(OWNER, || audit_tree(closed.as_fd(), scene.id)).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::PermissionDenied, Some(libc::EACCES)));
    drop((outside, closed));
    scene.end();
}

#[test]
fn who_keeps_changing_ids_is_not_waited_for() {
    let scene = Scene::new(5204);
    fs::create_dir(scene.tree().join("sub")).unwrap();
    let sub = File::open(scene.tree().join("sub")).unwrap();
    let other = ProjectId::new(5205).unwrap();
    let mut passes = 0;
    let error = tag_tree_reporting(
        File::open(scene.tree()).unwrap().as_fd(),
        scene.id,
        &TagOptions { most_passes: 5, ..TagOptions::default() },
        &mut |report| {
            passes = report.passes;
            assign_project(&sub, other).unwrap();
        },
    )
    .unwrap_err();
    assert_eq!((error.kind(), passes), (ErrorKind::Busy, 5));
    drop(sub);
    scene.end();
}

#[test]
fn only_a_directory_of_a_file_system_with_project_ids_can_be_tagged() {
    let id = ProjectId::new(5206).unwrap();
    let options = TagOptions::default();
    let tmpfs = scratch();
    let error = tag_tree(File::open(tmpfs.path()).unwrap().as_fd(), id, &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let path = tmpfs.path().join("file");
    fs::write(&path, "").unwrap();
    let error = tag_tree(File::open(&path).unwrap().as_fd(), id, &options).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOTDIR));
}
