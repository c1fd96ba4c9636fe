//! Tests of clones of large and deep trees, and of trees with mounts in them.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use loopfs::mount::{MountFlags, bind_mount, unmount};
use loopfs::project_tree::{CloneReport, SkipReason, SkippedEntry, clone_tree};
use nix::fcntl::{OFlag, openat};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, mkdirat};

use super::clone::set_times;
use super::portrait::{assert_equal_trees, read_tree_metadata};
use super::shapes::remove_levels;
use super::{Fixture, nothing};
use crate::environment::default_with;

const DIRECTORY: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

#[test]
fn deep_clones_need_few_descriptors() {
    const LEVELS: u64 = 5000;
    let fixture = Fixture::new(5411);
    let mut here = OwnedFd::from(File::open(fixture.tree()).unwrap());
    for _ in 0..LEVELS {
        mkdirat(&here, "d", Mode::S_IRWXU).unwrap();
        here = openat(&here, "d", DIRECTORY, Mode::empty()).unwrap();
    }
    let create = OFlag::O_CREAT | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    let lowest = File::from(openat(&here, "file", create, Mode::S_IRUSR).unwrap());
    nix::sys::stat::futimens(
        &here,
        &nix::sys::time::TimeSpec::new(1, 2),
        &nix::sys::time::TimeSpec::new(3, 4),
    )
    .unwrap();
    drop((here, lowest));

    let copy = fixture.empty_copy();
    let (root, target) = (File::open(fixture.tree()).unwrap(), File::open(&copy).unwrap());
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let highest = fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<u64>().unwrap())
        .max();
    // The highest descriptor may have been that of the listing itself, which is closed again.
    setrlimit(Resource::RLIMIT_NOFILE, highest.unwrap() + 10, hard).unwrap();
    let report = clone_tree(root.as_fd(), target.as_fd(), |_| {});
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();

    let report = report.unwrap();
    assert_eq!((report.directories, report.files, report.is_complete()), (LEVELS + 1, 1, true));
    let mut here = OwnedFd::from(target.try_clone().unwrap());
    for _ in 0..LEVELS {
        here = openat(&here, "d", DIRECTORY, Mode::empty()).unwrap();
    }
    let status = nix::sys::stat::fstat(&here).unwrap();
    assert_eq!(
        (status.st_mtime, status.st_mtime_nsec),
        (3, 4),
        "the times are those of the deepest directory"
    );
    drop(openat(&here, "file", OFlag::O_RDONLY, Mode::empty()).unwrap());
    drop(here);
    remove_levels(&root);
    remove_levels(&target);
    drop((root, target));
    fixture.end();
}

/// The owner of the tree chooses its order: here the walk meets no second name before all first names. A clone of as many files with one
/// name each takes the memory for names that this test does not look at, also what the allocator keeps of it.
#[test]
fn hard_links_need_no_memory() {
    let (of_files, of_links) = (growth_of_clone(false), growth_of_clone(true));
    assert!(of_links < of_files + (1 << 19), "{of_files} bytes without hard links, and {of_links} with them");
}

/// Returns the memory that a clone of two directories takes, whose entries are hard links to each other or files.
fn growth_of_clone(are_links: bool) -> u64 {
    const FILES: u64 = 8000;
    let fixture = Fixture::new(5414);
    let (first, second) = (fixture.tree().join("1"), fixture.tree().join("2"));
    fs::create_dir(&first).unwrap();
    fs::create_dir(&second).unwrap();
    for n in 0..FILES {
        let (path, other) = (first.join(n.to_string()), second.join(n.to_string()));
        File::create(&path).unwrap();
        if are_links {
            fs::hard_link(path, other).unwrap();
        } else {
            File::create(other).unwrap();
        }
    }
    // Without the pages of the program, which the kernel may read again at any moment.
    let anonymous = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    let (root, target) = (File::open(fixture.tree()).unwrap(), File::open(fixture.empty_copy()).unwrap());
    let (before, mut most) = (anonymous(), 0);
    let report = clone_tree(&root, &target, |_| most = most.max(anonymous())).unwrap();
    let (files, links) = if are_links { (FILES, FILES) } else { (2 * FILES, 0) };
    assert_eq!((report.files, report.hard_links, report.is_complete()), (files, links, true));
    drop((root, target));
    fixture.end();
    most.saturating_sub(before)
}

#[test]
fn a_hundred_levels_are_cloned() {
    let fixture = Fixture::new(5412);
    let mut levels = vec![fixture.tree()];
    for n in 0..100 {
        let path = levels.last().unwrap().join(format!("level {n}"));
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), vec![n; usize::from(n) * 100]).unwrap();
        if n > 0 {
            fs::hard_link(levels.last().unwrap().join("file"), path.join("linked")).unwrap();
        }
        levels.push(path);
    }
    for (n, path) in (0..).zip(&levels) {
        set_times(path, (1000 + n, 1), (2000 + n, 2));
    }
    let expected = read_tree_metadata(&fixture.tree());
    let (copy, report) = fixture.clone();
    assert_equal_trees(&read_tree_metadata(&copy), &expected);
    assert_eq!((report.directories, report.files, report.hard_links), (101, 100, 99));
    fixture.end();
}

#[test]
fn thousands_of_entries_are_cloned_once() {
    const ENTRIES: u64 = 5000;
    let fixture = Fixture::new(5413);
    let mut directories = 1;
    for n in 0..ENTRIES {
        let path = fixture.tree().join(format!("entry with a name of some length {n}"));
        if n % 50 == 0 {
            fs::create_dir(path).unwrap();
            directories += 1;
        } else {
            File::create(path).unwrap();
        }
    }
    let copy = fixture.empty_copy();
    let mut reported = Vec::new();
    let report = clone_tree(
        File::open(fixture.tree()).unwrap().as_fd(),
        File::open(&copy).unwrap().as_fd(),
        |report| reported.push(report.names),
    )
    .unwrap();
    let expected = default_with(|report: &mut CloneReport| {
        report.names = ENTRIES + 1;
        report.directories = directories;
        report.files = ENTRIES + 1 - directories;
        report.skipped = nothing();
    });
    assert_eq!(report, expected);
    assert_eq!(reported, (1..=ENTRIES / 1024).map(|n| n * 1024).collect::<Vec<_>>());
    let names = |tree: &PathBuf| {
        let mut names: Vec<_> = fs::read_dir(tree).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&copy), names(&fixture.tree()));
    assert_eq!(fixture.charged().1, ENTRIES + 1);
    fixture.end();
}

/// The files that a mount covers are not cloned either.
#[test]
fn mounts_are_not_cloned() {
    let fixture = Fixture::new(5414);
    let tree = fixture.tree();
    fs::create_dir(tree.join("bound")).unwrap();
    fs::write(tree.join("bound/covered"), "").unwrap();
    fs::write(tree.join("file"), "").unwrap();
    let source = File::open(fixture.outside().join("directory")).unwrap();
    bind_mount(source.as_fd(), &tree.join("bound"), MountFlags::default()).unwrap();
    let (copy, report) = fixture.clone();
    unmount(&tree.join("bound")).unwrap();
    assert_eq!((report.names, report.skipped.mounts, report.is_complete()), (2, 1, false));
    let bound = SkippedEntry { path: "bound".into(), reason: SkipReason::Mount };
    assert_eq!(report.skipped.examples, [bound]);
    assert!(!copy.join("bound").exists() && copy.join("file").exists());
    drop(source);
    fixture.end();
}

#[test]
fn symbolic_links_are_copied_unfollowed() {
    let fixture = Fixture::new(5415);
    let outside = fixture.outside();
    for (name, destination) in [("directory", outside.clone()), ("file", outside.join("file"))] {
        std::os::unix::fs::symlink(destination, fixture.tree().join(name)).unwrap();
    }
    let (copy, report) = fixture.clone();
    assert_eq!((report.names, report.special_files), (3, 2));
    assert_eq!(fs::read_link(copy.join("directory")).unwrap(), outside);
    assert_eq!(fs::symlink_metadata(copy.join("file")).unwrap().nlink(), 1);
    assert_eq!(fixture.charged().1, 3);
    fixture.end();
}
