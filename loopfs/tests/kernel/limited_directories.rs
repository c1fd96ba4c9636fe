//! Tests of directories that one call limits.

use std::fs::{self, File};
use std::path::Path;

use loopfs::project_quota::{Limits, ProjectIds, Release, Usage, assign_project, project_of};
use loopfs::project_tree::{LIMITED_DIRECTORIES, limit_directory, unlimit_directory};
use loopfs::{Bytes, ErrorKind, Inodes};

use crate::environment::{Leaks, MIB, directory, project, quota, scratch, xfs};
use crate::fixtures::assert_fails;

const SOME: Limits = Limits::hard(Bytes(MIB), Inodes(64));

fn open(path: &Path) -> File {
    File::open(path).unwrap()
}

fn used() -> Vec<Usage> {
    let root = open(&xfs());
    quota(&root).finish_inactivation(*LIMITED_DIRECTORIES.start()).unwrap();
    quota(&root).ids(LIMITED_DIRECTORIES).map(Result::unwrap).collect()
}

#[test]
fn a_directory_is_limited_and_unlimited() {
    let _leaks = Leaks::watch();
    let directory = directory();
    let path = directory.path();
    fs::create_dir(path.join("below")).unwrap();
    fs::write(path.join("below/file"), [7; 8192]).unwrap();
    File::open(path.join("below/file")).unwrap().sync_all().unwrap();

    let report = limit_directory(open(path), SOME).unwrap();
    assert_eq!((report.changed, report.skipped.is_empty()), (2, true), "the root was assigned before");
    let [usage] = used().try_into().unwrap();
    assert_eq!((usage.bytes, usage.inodes), (Bytes(8192), Inodes(3)));
    assert_eq!(usage.limits.bytes, Some(Bytes(MIB)));
    assert_eq!(project_of(open(path)).unwrap(), usage.id.get());
    assert!(fs::write(path.join("large"), vec![7; 2 << 20]).is_err(), "the limit holds");
    fs::remove_file(path.join("large")).unwrap();

    // Links between names in the project, which a program creates later.
    fs::hard_link(path.join("below/file"), path.join("link")).unwrap();
    limit_directory(open(path), Limits::hard(Bytes(2 * MIB), Inodes(64))).unwrap();
    let [again] = used().try_into().unwrap();
    assert_eq!((again.id, again.limits.bytes), (usage.id, Some(Bytes(2 * MIB))));
    assert_fails(limit_directory(open(path), Limits::UNLIMITED), ErrorKind::InvalidInput);

    for _ in 0..2 {
        assert_eq!(unlimit_directory(open(path)).unwrap(), Release::Freed);
        assert_eq!(used(), []);
    }
    for name in [".", "below", "below/file"] {
        assert_eq!(project_of(open(&path.join(name))).unwrap(), 0, "{name}");
    }
}

/// The limit of the outer directory stays.
#[test]
fn a_directory_inside_of_a_limited_one_is_refused() {
    let _leaks = Leaks::watch();
    let directory = directory();
    limit_directory(open(directory.path()), SOME).unwrap();
    let inner = directory.path().join("inner");
    fs::create_dir(&inner).unwrap();
    assert_fails(limit_directory(open(&inner), Limits::hard(Bytes(2 * MIB), Inodes(9))), ErrorKind::Conflict);
    assert_fails(unlimit_directory(open(&inner)), ErrorKind::Conflict);
    let [usage] = used().try_into().unwrap();
    assert_eq!((usage.limits.bytes, usage.inodes), (Some(Bytes(MIB)), Inodes(2)));
    assert_eq!(project_of(open(&inner)).unwrap(), usage.id.get());
    assert_eq!(unlimit_directory(open(directory.path())).unwrap(), Release::Freed);
}

#[test]
fn removed_directories_free_their_ids() {
    let _leaks = Leaks::watch();
    let (removed, next) = (directory(), directory());
    let deleted = open(removed.path());
    limit_directory(&deleted, SOME).unwrap();
    removed.close().unwrap();
    limit_directory(open(next.path()), SOME).unwrap();
    assert_eq!(used().len(), 2, "a process has the removed directory open");
    drop(deleted);
    assert_eq!(used().len(), 2, "only its limits reserve the id");
    assert_eq!(unlimit_directory(open(next.path())).unwrap(), Release::Freed);
    limit_directory(open(next.path()), SOME).unwrap();
    assert_eq!(used().len(), 1);
    assert_eq!(unlimit_directory(open(next.path())).unwrap(), Release::Freed);
    assert_eq!(used(), []);
    next.close().unwrap();
}

#[test]
fn a_foreign_project_is_not_limited() {
    let _leaks = Leaks::watch();
    let directory = directory();
    assign_project(open(directory.path()), project(5600)).unwrap();
    for error in [
        limit_directory(open(directory.path()), SOME).unwrap_err(),
        unlimit_directory(open(directory.path())).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        assert!(error.to_string().contains("5600"), "{error}");
    }
}

/// The allocator is opened on the directory, as one does that has no other descriptor of the file system.
#[test]
fn an_allocator_keeps_no_directory_open() {
    let _leaks = Leaks::watch();
    let (directory, scratch) = (directory(), scratch());
    let lock = File::create(scratch.path().join("lock")).unwrap();
    let range = project(5700)..=project(5709);
    let limited = open(directory.path());
    let ids = ProjectIds::new(&limited, lock, range).unwrap();
    let id = ids.create(&limited, SOME).unwrap();
    drop(limited);
    directory.close().unwrap();
    assert_eq!(ids.release(id).unwrap(), Release::Freed);
}
