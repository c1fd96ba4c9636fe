//! Tests that provoke each error of project quotas and check that the errors can be distinguished.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::{OpenOptionsExt, chown};
use std::path::{Path, PathBuf};

use loopfs::mount::{MountFlags, bind_mount, table as mountinfo, unmount};
use loopfs::project_quota::{Enforcement, Limit, Limits, ProjectIds, assign_project, project_of};
use loopfs::volume_store::{StoreOptions, VolumeStore};
use loopfs::{Bytes, ErrorKind, Inodes, test_support};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, unshare};

use crate::environment::{Leaks, MIB, directory, project, quota, scratch, xfs, xfs_without_quota};
use crate::fixtures::{assert_fails, assert_refused};
use crate::namespaces::{NOBODY, alone_unprivileged};

const SOME: Limits = Limits::hard(Bytes(MIB), Inodes(64));
/// Set in the child process; the value is the directory that it works on.
const CHILD: &str = "LOOPFS_TEST_CHILD";

#[track_caller]
pub(crate) fn assert_explained<T>(result: loopfs::Result<T>, kind: ErrorKind, errno: Errno, remedy: &str) {
    let error = assert_refused(result, kind, Some(errno));
    assert!(error.to_string().contains(remedy), "no remedy ({remedy}) in: {error}");
}

/// Runs the rest of this test as a user without capabilities, on a directory that this user owns. The user needs a
/// process of its own, which runs this test again. Returns `None` in the parent once the child has passed.
pub(crate) fn run_without_capabilities() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(CHILD) {
        return Some(path.into());
    }
    let owned = directory();
    chown(owned.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let child = alone_unprivileged(CHILD, owned.path(), |command| command.output()).unwrap();
    let output = String::from_utf8_lossy(&child.stdout) + String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && output.contains("1 passed"), "{output}");
    owned.close().unwrap();
    None
}

#[test]
fn quota_calls_without_capabilities_are_refused() {
    let Some(owned) = run_without_capabilities() else { return };
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4101));
    let denied = ErrorKind::PermissionDenied;
    assert_explained(quota.usage(id), denied, Errno::EPERM, "CAP_SYS_ADMIN");
    assert_explained(quota.set_limits(id, SOME), denied, Errno::EPERM, "CAP_SYS_ADMIN");
    assert_explained(quota.clear_limits(id), denied, Errno::EPERM, "CAP_SYS_ADMIN");
    assert_explained(quota.finish_inactivation(id), denied, Errno::EPERM, "CAP_SYS_ADMIN");
    let mut ids = quota.ids(id..=id);
    assert_explained(ids.next().unwrap(), denied, Errno::EPERM, "CAP_SYS_ADMIN");
    assert!(ids.next().is_none(), "an error ends the list");
    // The enforcement state and the project id can be read without capabilities.
    assert_eq!(quota.enforcement().unwrap(), Enforcement::Enforcing);
    assert_eq!(project_of(&root).unwrap(), 0);
    assert_explained(test_support::set_project(&root, id), denied, Errno::EPERM, "owner");
    // This is the documented weakness. The assertion fails if a kernel removes it.
    assign_project(File::open(owned).unwrap(), id).unwrap();
}

#[test]
fn user_namespace_capabilities_are_insufficient() {
    let Some(owned) = run_without_capabilities() else { return };
    unshare(CloneFlags::CLONE_NEWUSER).unwrap();
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4102));
    let refused = ErrorKind::InUserNamespace;
    assert_explained(quota.usage(id), refused, Errno::EPERM, "initial one");
    assert_explained(quota.set_limits(id, SOME), refused, Errno::EPERM, "initial one");
    assert_explained(quota.finish_inactivation(id), refused, Errno::EPERM, "initial one");
    assert_explained(quota.ids(id..=id).next().unwrap(), refused, Errno::EPERM, "initial one");
    assert_eq!(quota.enforcement().unwrap(), Enforcement::Enforcing);
    assert_explained(test_support::set_project(&root, id), refused, Errno::EPERM, "initial one");
    // In a user namespace the owner cannot move its files to another project.
    assert_explained(assign_project(File::open(owned).unwrap(), id), refused, Errno::EINVAL, "initial one");
}

#[test]
fn an_xfs_without_quotas_is_refused() {
    let root = File::open(xfs_without_quota()).unwrap();
    let (quota, id) = (quota(&root), project(4103));
    let off = ErrorKind::NotEnforced;
    assert_eq!(quota.enforcement().unwrap(), Enforcement::NoQuota);
    assert_explained(quota.usage(id), off, Errno::ENOSYS, "option prjquota");
    assert_explained(quota.clear_limits(id), off, Errno::ENOSYS, "option prjquota");
    assert_explained(quota.ids(id..=id).next().unwrap(), off, Errno::ENOSYS, "option prjquota");
    for result in [quota.set_limits(id, SOME).map(drop), quota.require_enforcing()] {
        // The library queries the state before and does not try.
        let error = assert_refused(result, off, None);
        assert!(error.to_string().contains("option prjquota"), "{error}");
    }
    quota.finish_inactivation(id).unwrap();
}

#[test]
fn filesystems_without_quotas_are_refused() {
    let scratch = scratch();
    let root = File::open(scratch.path()).unwrap();
    let (quota, id) = (quota(&root), project(4104));
    assert_eq!(quota.enforcement().unwrap(), Enforcement::NoQuota);
    assert_explained(quota.usage(id), ErrorKind::NotEnforced, Errno::ENOSYS, "option prjquota");
    assert_eq!(quota.set_limits(id, SOME).unwrap_err().kind(), ErrorKind::NotEnforced);
    assert_explained(quota.finish_inactivation(id), ErrorKind::Unsupported, Errno::ENOTTY, "not XFS");
    assert_fails(assign_project(&root, id), ErrorKind::Unsupported);
}

/// Calls that need an open file fail with such a descriptor.
#[test]
fn o_path_suffices_for_quota_calls() {
    let root = File::options().read(true).custom_flags(OFlag::O_PATH.bits()).open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4105));
    // The quota calls only need a descriptor of the file system.
    quota.set_limits(id, SOME).unwrap();
    assert!(quota.usage(id).unwrap().is_some());
    quota.clear_limits(id).unwrap();
    let invalid = ErrorKind::InvalidInput;
    assert_explained(quota.finish_inactivation(id), invalid, Errno::EBADF, "O_PATH");
    assert_explained(project_of(&root), invalid, Errno::EBADF, "O_PATH");
    assert_explained(assign_project(&root, id), invalid, Errno::EBADF, "O_PATH");
}

#[test]
fn read_only_mounts_refuse_changes() {
    let _leaks = Leaks::watch();
    let (directory, target) = (directory(), scratch());
    let flags = MountFlags { read_only: true, ..MountFlags::default() };
    bind_mount(File::open(directory.path()).unwrap(), target.path(), flags).unwrap();
    let root = File::open(target.path()).unwrap();
    let (quota, id) = (quota(&root), project(4106));
    let read_only = ErrorKind::ReadOnly;
    assert_explained(quota.set_limits(id, SOME), read_only, Errno::EROFS, "writable mount");
    assert_explained(quota.clear_limits(id), read_only, Errno::EROFS, "writable mount");
    assert_explained(assign_project(&root, id), read_only, Errno::EROFS, "writable mount");
    assert_eq!(quota.usage(id).unwrap(), None, "reading is not refused");
    quota.finish_inactivation(id).unwrap();
    drop(root);
    assert!(unmount(target.path()).unwrap());
}

/// The file system without quotas, mounted with other options for one test.
struct Remounted {
    path: PathBuf,
    source: PathBuf,
}

const HARDENED: MsFlags = MsFlags::MS_NODEV.union(MsFlags::MS_NOSUID).union(MsFlags::MS_NOEXEC);

impl Remounted {
    fn with(options: &str, flags: MsFlags) -> Self {
        let path = xfs_without_quota();
        let source = mountinfo::at(&mountinfo::read().unwrap(), &path).expect("a mount").source.clone();
        umount(&path).unwrap();
        let remounted = Self { path, source };
        remounted.mount(options, flags).unwrap();
        remounted
    }

    fn mount(&self, options: &str, flags: MsFlags) -> nix::Result<()> {
        mount(Some(&self.source), Path::new(&self.path), Some("xfs"), HARDENED | flags, Some(options))
    }
}

impl Drop for Remounted {
    fn drop(&mut self) {
        // Either call may have failed before. Only the final mount matters.
        umount(&self.path).ok();
        self.mount("noquota", MsFlags::empty()).ok();
    }
}

/// The file system counts the usage and does not enforce limits.
#[test]
fn unenforced_limits_are_refused() {
    let counted = Remounted::with("pqnoenforce", MsFlags::empty());
    let root = File::open(&counted.path).unwrap();
    let (quota, id) = (quota(&root), project(4107));
    assert_eq!(quota.enforcement().unwrap(), Enforcement::AccountingOnly);
    let bytes = Limits { bytes: Limit::Hard(Bytes(MIB)), ..Limits::KEEP };
    for error in [quota.set_limits(id, bytes).unwrap_err(), quota.require_enforcing().unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::NotEnforced);
        assert!(error.to_string().contains("instead of pqnoenforce"), "{error}");
    }
    assert_eq!(quota.usage(id).unwrap(), None, "no limit was set");

    let directory = tempfile::tempdir_in(&counted.path).unwrap();
    assign_project(File::open(directory.path()).unwrap(), id).unwrap();
    // The usage is counted although limits are not enforced.
    assert_eq!(quota.usage(id).unwrap().unwrap().inodes, Inodes(1));
    quota.clear_limits(id).unwrap();
    directory.close().unwrap();
    drop(root);
    drop(counted);
    let restored = File::open(xfs_without_quota()).unwrap();
    assert_eq!(crate::environment::quota(&restored).enforcement().unwrap(), Enforcement::NoQuota);
}

#[test]
fn read_only_filesystems_refuse_changes() {
    let read_only = Remounted::with("prjquota", MsFlags::empty());
    mount(
        None::<&Path>,
        &read_only.path,
        None::<&Path>,
        HARDENED | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY,
        None::<&Path>,
    )
    .unwrap();
    let root = File::open(&read_only.path).unwrap();
    let (quota, id) = (quota(&root), project(4108));
    assert_eq!(quota.enforcement().unwrap(), Enforcement::Enforcing);
    assert_explained(quota.set_limits(id, SOME), ErrorKind::ReadOnly, Errno::EROFS, "writable mount");
    assert_explained(quota.finish_inactivation(id), ErrorKind::ReadOnly, Errno::EROFS, "writable mount");
    assert_eq!(quota.usage(id).unwrap(), None);
}

#[test]
fn lists_need_project_quotas() {
    let users_only = Remounted::with("uquota", MsFlags::empty());
    let root = File::open(&users_only.path).unwrap();
    let (quota, id) = (quota(&root), project(4110));
    let mut ids = quota.ids(id..=id);
    assert_fails(ids.next().unwrap(), ErrorKind::NotEnforced);
    assert!(ids.next().is_none());
    let scratch = scratch();
    let lock = File::create(scratch.path().join("lock")).unwrap();
    let ids = ProjectIds::new(&root, lock, id..=id).unwrap();
    assert_fails(ids.recover(&HashSet::new()), ErrorKind::NotEnforced);
}

#[test]
fn a_store_refuses_default_limits() {
    let remounted = Remounted::with("prjquota", MsFlags::empty());
    let root = File::open(&remounted.path).unwrap();
    test_support::set_default_limit(&root, 8).unwrap();
    let error = VolumeStore::open(&remounted.path, StoreOptions::default()).unwrap_err();
    test_support::set_default_limit(&root, 0).unwrap();
    assert_eq!(error.kind(), ErrorKind::WrongFilesystem, "{error}");
    assert!(error.to_string().contains("limit -p -d"), "{error}");
    drop(root);
}
