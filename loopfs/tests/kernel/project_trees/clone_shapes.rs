//! Tests of clones of large and deep trees, and of trees with mounts in them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use loopfs::mount::{MountFlags, bind_mount, unmount};
use loopfs::project_tree::{CloneReport, SkipReason, SkippedEntry, clone_tree};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat, futimens};
use nix::sys::time::TimeSpec;
use peak_alloc::PeakAlloc;

use super::Fixture;
use super::shapes::{ENTRIES, make_entries, make_levels, open_level, remove_levels, with_few_descriptors};
use crate::environment::default_with;

/// It counts what all tests allocate, which run one after the other.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;
/// Less than four bytes for each of a thousand files, and more than a thread of an earlier test takes.
const FEW_BYTES: usize = 4000;

#[test]
fn deep_clones_need_few_descriptors() {
    const LEVELS: u64 = 2100;
    let fixture = Fixture::new(5411);
    let copy = fixture.empty_copy();
    let (root, target) = (File::open(fixture.tree()).unwrap(), File::open(&copy).unwrap());
    let lowest = make_levels(&root, LEVELS);
    let file = openat(&lowest, "file", OFlag::O_CREAT | OFlag::O_WRONLY, Mode::S_IRUSR).unwrap();
    File::from(file).write_all(b"x").unwrap();
    futimens(&lowest, &TimeSpec::new(1, 2), &TimeSpec::new(3, 4)).unwrap();
    drop(lowest);
    let report = with_few_descriptors(10, || clone_tree(&root, &target, |_| {})).unwrap();
    assert_eq!((report.directories, report.files, report.is_complete()), (LEVELS + 1, 1, true));
    let modified = |directory: &OwnedFd| fstat(directory).map(|of| (of.st_mtime, of.st_mtime_nsec)).unwrap();
    let [mut original, mut here] = [&root, &target].map(|tree| OwnedFd::from(tree.try_clone().unwrap()));
    for level in 0..LEVELS {
        (original, here) = (open_level(&original), open_level(&here));
        assert_eq!(modified(&here), modified(&original), "the times of level {level}");
    }
    assert_eq!(modified(&here), (3, 4));
    let file = File::from(openat(&here, "file", OFlag::O_RDONLY, Mode::empty()).unwrap());
    assert_eq!(io::read_to_string(file).unwrap(), "x");
    drop((original, here));
    remove_levels(&root);
    remove_levels(&target);
}

/// The owner of the tree chooses its order: here the walk meets no second name before all first names. A clone of as many files with one
/// name each takes the memory for names that this test does not look at.
#[test]
fn hard_links_need_no_memory() {
    let (of_files, of_links) = (memory_of_clone(false), memory_of_clone(true));
    assert!(of_links < of_files + FEW_BYTES, "{of_files} bytes without hard links, and {of_links} with them");
}

/// Returns the memory that a clone of two directories takes, whose entries are hard links to each other or files.
fn memory_of_clone(are_links: bool) -> usize {
    const FILES: u64 = 1000;
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
    let (root, target) = (File::open(fixture.tree()).unwrap(), File::open(fixture.empty_copy()).unwrap());
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let report = clone_tree(&root, &target, |_| {}).unwrap();
    let [taken, kept] = [HEAP.peak_usage(), HEAP.current_usage()].map(|bytes| bytes.saturating_sub(before));
    let (files, links) = if are_links { (FILES, FILES) } else { (2 * FILES, 0) };
    assert_eq!((report.files, report.hard_links, report.is_complete()), (files, links, true));
    assert!(kept < FEW_BYTES, "the call keeps {kept} bytes");
    taken
}

#[test]
fn thousands_of_entries_are_cloned_once() {
    let fixture = Fixture::new(5413);
    let directories = make_entries(&fixture.tree());
    let copy = fixture.empty_copy();
    let mut reported = Vec::new();
    let report = clone_tree(File::open(fixture.tree()).unwrap(), File::open(&copy).unwrap(), |report| {
        reported.push(report.names)
    })
    .unwrap();
    let expected = default_with(|report: &mut CloneReport| {
        report.names = ENTRIES + 1;
        report.directories = directories;
        report.files = ENTRIES + 1 - directories;
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
    bind_mount(&source, &tree.join("bound"), MountFlags::default()).unwrap();
    let (copy, report) = fixture.clone();
    unmount(&tree.join("bound")).unwrap();
    assert_eq!((report.names, report.skipped.mounts, report.is_complete()), (2, 1, false));
    let bound = SkippedEntry { path: "bound".into(), reason: SkipReason::Mount };
    assert_eq!(report.skipped.examples, [bound]);
    assert!(!copy.join("bound").exists() && copy.join("file").exists());
}
