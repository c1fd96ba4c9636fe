//! Tests of trees of different shapes that do not change during the walk.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use loopfs::project_quota::Limits;
use loopfs::project_tree::{HardLinks, Skipped, StrayInode, TreeReport, check_tree, clear_tree, tag_tree};
use loopfs::{Bytes, Inodes, test_support};
use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::{Fixture, project_at};
use crate::environment::{project, quota, xfs};

/// Creates three directories and three files of different sizes.
fn populate(tree: &Path) {
    fs::create_dir_all(tree.join("a/b")).unwrap();
    fs::write(tree.join("empty"), "").unwrap();
    fs::write(tree.join("a/small"), [1; 100]).unwrap();
    fs::write(tree.join("a/b/large"), vec![2; 300_000]).unwrap();
}

/// Returns the bytes and inodes of a tree without hard links, according to stat(2).
fn usage_of(directory: &Path) -> (u64, u64) {
    let own = fs::symlink_metadata(directory).unwrap();
    let mut sum = (own.blocks() * 512, 1);
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let (bytes, inodes) = if entry.file_type().unwrap().is_dir() {
            usage_of(&entry.path())
        } else {
            (entry.metadata().unwrap().blocks() * 512, 1)
        };
        sum = (sum.0 + bytes, sum.1 + inodes);
    }
    sum
}

/// New entries of the tree inherit the project id.
#[test]
fn tagging_charges_the_trees_usage() {
    let fixture = Fixture::new(5001);
    populate(&fixture.tree());
    let report = fixture.tag().unwrap();
    let expected =
        TreeReport { passes: 2, changed: 6, names: 6, directories: 3, skipped: Skipped::default() };
    assert_eq!(report, expected);
    assert_eq!(fixture.charged(), usage_of(&fixture.tree()));
    assert_eq!(project_at(&fixture.tree().join("a/b/large")), 5001);

    fs::create_dir(fixture.tree().join("a/b/new")).unwrap();
    fs::write(fixture.tree().join("a/b/new/file"), [3; 5000]).unwrap();
    assert_eq!(fixture.charged(), usage_of(&fixture.tree()));
    let again = fixture.tag().unwrap();
    assert_eq!((again.passes, again.changed), (1, 0), "the new entries inherited the id");
    let check = fixture.check();
    assert!(check.is_clean() && check.skipped.is_empty() && !check.disturbed, "{check:?}");
    assert_eq!((check.names, check.directories), (8, 4));
}

#[test]
fn clearing_ends_charges_and_inheritance() {
    let fixture = Fixture::new(5002);
    populate(&fixture.tree());
    fixture.tag().unwrap();
    let root = File::options().read(true).custom_flags(libc::O_PATH).open(fixture.tree()).unwrap();
    let report = clear_tree(root, fixture.id).unwrap();
    assert_eq!((report.changed, report.skipped), (6, Skipped::default()));
    assert_eq!(fixture.charged(), (0, 0));
    let check = fixture.check();
    assert_eq!((check.other_project, check.not_inheriting), (6, 3));
    fs::write(fixture.tree().join("a/b/new"), "").unwrap();
    assert_eq!(project_at(&fixture.tree().join("a/b/new")), 0);
}

#[test]
fn tagging_can_exceed_the_limit() {
    let fixture = Fixture::new(5003);
    populate(&fixture.tree());
    let root = File::open(xfs()).unwrap();
    quota(&root).set_limits(fixture.id, Limits::hard(Bytes(4096), Inodes(2))).unwrap();
    assert_eq!(fixture.tag().unwrap().changed, 6);
    assert_eq!(fixture.charged(), usage_of(&fixture.tree()));
    let refused = File::create(fixture.tree().join("a/one more")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    quota(&root).clear_limits(fixture.id).unwrap();
}

#[test]
fn a_check_lists_strays() {
    let fixture = Fixture::new(5004);
    populate(&fixture.tree());
    fixture.tag().unwrap();
    // A file that is created while its directory is in another project stays in that project.
    let b = File::open(fixture.tree().join("a/b")).unwrap();
    test_support::set_project(&b, project(5005)).unwrap();
    fs::write(fixture.tree().join("a/b/hidden"), [4; 9000]).unwrap();
    let stray = |path: &str, project, inherits| StrayInode { path: PathBuf::from(path), project, inherits };
    let found = fixture.check();
    assert_eq!((found.other_project, found.not_inheriting), (2, 0));
    assert_eq!(found.strays, [stray("a/b", 5005, true), stray("a/b/hidden", 5005, false)]);
    test_support::set_project(&b, fixture.id).unwrap();
    assert_eq!(fixture.check().strays, [stray("a/b/hidden", 5005, false)]);
    assert_ne!(fixture.charged(), usage_of(&fixture.tree()));

    assert_eq!(fixture.tag().unwrap().changed, 1);
    assert!(fixture.check().is_clean());
    assert_eq!(fixture.charged(), usage_of(&fixture.tree()));

    clear_tree(&b, fixture.id).unwrap();
    let cleared = fixture.check();
    assert_eq!((cleared.other_project, cleared.not_inheriting), (3, 1));
    assert!(cleared.strays.contains(&stray("a/b", 0, false)), "{cleared:?}");
}

#[test]
fn names_may_be_any_bytes() {
    let fixture = Fixture::new(5006);
    let long = [b'x'; 255];
    let names: [&[u8]; 5] = [b"line\nfeed", b"\xff\xfe", b"...", b" ", &long];
    for name in names {
        let directory = fixture.tree().join(OsStr::from_bytes(name));
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join(OsStr::from_bytes(name)), "").unwrap();
    }
    let found = fixture.check();
    for name in names {
        let path = Path::new(OsStr::from_bytes(name)).join(OsStr::from_bytes(name));
        assert!(found.strays.iter().any(|stray| stray.path == path), "{path:?} of {found:?}");
    }
    assert_eq!(fixture.tag().unwrap().changed, 11);
    assert!(fixture.check().is_clean());
}

pub(super) const ENTRIES: u64 = 2100;

/// Creates [`ENTRIES`] entries in a directory. Returns the number of directories, including that one.
pub(super) fn make_entries(directory: &Path) -> u64 {
    for n in 0..ENTRIES {
        let path = directory.join(format!("entry with a name of some length {n}"));
        // Each directory makes the walk leave the listing and continue it later.
        if n % 50 == 0 {
            fs::create_dir(path).unwrap();
        } else {
            File::create(path).unwrap();
        }
    }
    1 + ENTRIES.div_ceil(50)
}

#[test]
fn thousands_of_entries_are_visited_once() {
    let fixture = Fixture::new(5007);
    let directories = make_entries(&fixture.tree());
    let mut reports = Vec::new();
    let report = tag_tree(File::open(fixture.tree()).unwrap(), fixture.id, HardLinks::Skip, |report| {
        reports.push((report.passes, report.names, report.changed))
    })
    .unwrap();
    let expected = TreeReport {
        passes: 2,
        changed: ENTRIES + 1,
        names: ENTRIES + 1,
        directories,
        skipped: Skipped::default(),
    };
    assert_eq!(report, expected);
    // Progress is reported before the last entry is changed.
    assert_eq!(reports.first(), Some(&(1, 1024, 1023)));
    assert_eq!(reports.last(), Some(&(2, ENTRIES + 1, ENTRIES + 1)));
    assert_eq!(reports.len(), 6, "progress is reported every 1024 names and at the end of both passes");
    assert_eq!(fixture.charged().1, ENTRIES + 1);
}

#[test]
fn deep_trees_need_few_descriptors() {
    // The path of the lowest one exceeds PATH_MAX.
    const LEVELS: u64 = 2100;
    let fixture = Fixture::new(5008);
    let root = File::open(fixture.tree()).unwrap();
    let lowest = make_levels(&root, LEVELS);
    drop(openat(&lowest, "file", OFlag::O_CREAT | OFlag::O_WRONLY, Mode::S_IRUSR).unwrap());
    let (tagged, checked) = with_few_descriptors(4, || {
        let tagged = tag_tree(&root, fixture.id, HardLinks::Skip, |_| {});
        (tagged, check_tree(&root, project(5009), |_| {}))
    });
    let report = tagged.unwrap();
    assert_eq!((report.changed, report.directories), (LEVELS + 2, LEVELS + 1));
    assert!(fixture.check().is_clean());
    let check = checked.unwrap();
    assert_eq!(check.other_project, LEVELS + 2);
    assert_eq!(check.strays[2].path, Path::new("d/d"));
    drop(lowest);
    remove_levels(&root);
}

/// Creates `levels` directories, each in the previous one. Returns the last one.
pub(super) fn make_levels(root: &File, levels: u64) -> OwnedFd {
    let mut here = OwnedFd::from(root.try_clone().unwrap());
    for _ in 0..levels {
        mkdirat(&here, "d", Mode::S_IRWXU).unwrap();
        here = open_level(&here);
    }
    here
}

pub(super) fn open_level(parent: &OwnedFd) -> OwnedFd {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    openat(parent, "d", flags, Mode::empty()).unwrap()
}

/// Runs `work` with a limit that allows `more` further descriptors.
pub(super) fn with_few_descriptors<T>(more: u64, work: impl FnOnce() -> T) -> T {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let names = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name());
    // The highest descriptor may be that of the listing itself, which is closed again.
    let highest = names.map(|name| name.to_str().unwrap().parse::<u64>().unwrap()).max().unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, highest + more, hard).unwrap();
    let result = work();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    result
}

/// Removes the levels one by one, because `remove_dir_all` takes a descriptor for each level.
pub(super) fn remove_levels(tree: &File) {
    loop {
        match renameat(tree, "d/d", tree, "below") {
            Ok(()) => {
                unlinkat(tree, "d", UnlinkatFlags::RemoveDir).unwrap();
                renameat(tree, "below", tree, "d").unwrap();
            }
            Err(nix::errno::Errno::ENOENT) => break,
            Err(errno) => panic!("{errno}"),
        }
    }
}
