//! Tests of clones that fail or that skip entries.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use loopfs::project_quota::Limits;
use loopfs::project_tree::{SkipReason, SkippedEntry};
use loopfs::{Bytes, ErrorKind, Inodes, test_support};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::clone::{clone_into, set_attribute};
use super::{Fixture, fingerprint};
use crate::environment::{quota, scratch, xfs, xfs_without_quota};
use crate::fixtures::{assert_fails, assert_refused};

/// Creates a file with many extents: every second block is a hole.
fn write_pieces(path: &Path, pieces: u64) {
    let file = File::create(path).unwrap();
    for n in 0..pieces {
        file.write_all_at(&[1; 4096], n * 8192).unwrap();
    }
    file.sync_all().unwrap();
    assert!(test_support::extents(&file).unwrap().0 as u64 >= pieces);
}

/// The clone fails, and its files are complete or absent.
#[test]
fn a_low_limit_truncates_no_file() {
    const PIECES: u64 = 500;
    let fixture = Fixture::new(5421);
    write_pieces(&fixture.tree().join("pieces"), PIECES);
    let before = fingerprint(&fixture.tree());
    let root = File::open(xfs()).unwrap();
    // The limits are reached at several points in the middle of the file and just before its end.
    for pieces in [1, 2, PIECES / 3, PIECES - 1] {
        let copy = fixture.empty_copy();
        quota(&root).set_limits(fixture.id, Limits::hard(Bytes(pieces * 4096), Inodes(100))).unwrap();
        let error = assert_fails(clone_into(&fixture.tree(), &copy), ErrorKind::NoSpace);
        assert!(error.to_string().contains("\"pieces\"") && error.to_string().contains("limit"), "{error}");
        assert_eq!(fs::read_dir(&copy).unwrap().count(), 0, "no part of the file is left");
        fs::remove_dir(&copy).unwrap();
        fixture.charged();
    }
    assert_eq!(fingerprint(&fixture.tree()), before);
    let copy = fixture.empty_copy();
    // The limit is twice the final usage, because the kernel reserves more than it uses while it works.
    quota(&root).set_limits(fixture.id, Limits::hard(Bytes(PIECES * 8192), Inodes(100))).unwrap();
    assert!(clone_into(&fixture.tree(), &copy).unwrap().is_complete());
    assert_eq!(fs::read(copy.join("pieces")).unwrap(), fs::read(fixture.tree().join("pieces")).unwrap());
    // This includes the blocks of the extent tree of the file.
    let bytes = fs::metadata(copy.join("pieces")).unwrap().blocks() * 512;
    assert!((PIECES * 4096..PIECES * 4096 + 65536).contains(&bytes), "{bytes}");
    quota(&root).clear_limits(fixture.id).unwrap();
}

#[test]
fn too_few_inodes_are_an_error() {
    let fixture = Fixture::new(5422);
    for n in 0..10 {
        File::create(fixture.tree().join(format!("{n}"))).unwrap();
    }
    let root = File::open(xfs()).unwrap();
    let copy = fixture.empty_copy();
    quota(&root).set_limits(fixture.id, Limits::hard(Bytes(1 << 20), Inodes(5))).unwrap();
    assert_fails(clone_into(&fixture.tree(), &copy), ErrorKind::NoSpace);
    quota(&root).clear_limits(fixture.id).unwrap();
}

/// The target must be an empty directory beside the source on the same file system, and not inside the source.
#[test]
fn unsuitable_clone_targets_are_refused() {
    let fixture = Fixture::new(5423);
    fs::create_dir(fixture.tree().join("in it")).unwrap();
    fs::write(fixture.tree().join("file"), "content").unwrap();
    let (tree, file) = (fixture.tree(), fixture.tree().join("file"));
    let error = assert_fails(clone_into(&tree, &tree.join("in it")), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("is inside it"), "{error}");
    assert_fails(clone_into(&tree, &fixture.outside()), ErrorKind::AlreadyExists);
    let copy = fixture.empty_copy();
    for (source, target) in [(&file, &copy), (&copy, &file)] {
        let error = clone_into(source, target).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOTDIR), "{error}");
    }
    fs::remove_dir(tree.join("in it")).unwrap();
    let elsewhere = tempfile::tempdir_in(xfs_without_quota()).unwrap();
    assert_refused(clone_into(&tree, elsewhere.path()), ErrorKind::InvalidInput, Some(Errno::EXDEV));
    let (one, other) = (scratch(), scratch());
    fs::write(one.path().join("file"), "content").unwrap();
    let error = assert_fails(clone_into(one.path(), other.path()), ErrorKind::Unsupported);
    assert!(error.to_string().contains("reflink=1"), "{error}");
}

#[test]
fn uncloneable_entries_are_skipped_and_reported() {
    const NAMES: u64 = 300;
    let fixture = Fixture::new(5424);
    let tree = fixture.tree();
    // The names of the attributes exceed the buffer of listxattr(2).
    for name in ["beyond listing", "directory"] {
        if name == "directory" {
            fs::create_dir_all(tree.join("directory/below")).unwrap();
        } else {
            fs::write(tree.join(name), "content").unwrap();
        }
        for n in 0..NAMES {
            set_attribute(&tree.join(name), &format!("user.{n:0>250}"), b"");
        }
    }
    fs::write(tree.join("whole"), "content").unwrap();
    let (copy, report) = fixture.clone();
    assert!(!report.is_complete());
    assert_eq!((report.skipped.refused, report.names, report.files), (2, 4, 1));
    let refused = |path: &str| SkippedEntry { path: path.into(), reason: SkipReason::Refused(libc::E2BIG) };
    for path in ["beyond listing", "directory"] {
        assert!(report.skipped.examples.contains(&refused(path)), "{report:?}");
        assert!(!copy.join(path).exists());
    }
    assert_eq!(fs::read(copy.join("whole")).unwrap(), b"content");
}

#[test]
fn a_file_size_limit_truncates_nothing() {
    let fixture = Fixture::new(5425);
    fs::write(fixture.tree().join("file"), vec![1; 2 << 20]).unwrap();
    let copy = fixture.empty_copy();
    let (soft, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, 1 << 20, hard).unwrap();
    let report = clone_into(&fixture.tree(), &copy);
    setrlimit(Resource::RLIMIT_FSIZE, soft, hard).unwrap();
    match report {
        Ok(report) if report.is_complete() => {
            assert_eq!(fs::metadata(copy.join("file")).unwrap().len(), 2 << 20);
        }
        Ok(report) => {
            assert_eq!(report.skipped.refused, 1);
            assert!(!copy.join("file").exists());
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}"),
    }
}
