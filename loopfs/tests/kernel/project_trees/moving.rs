//! Tests of trees whose owner moves entries during the walk.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use loopfs::ErrorKind;
use loopfs::project_tree::{HardLinks, TreeReport, check_tree, clear_tree, tag_tree};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use rstest::rstest;

use super::{Fixture, fingerprint, project_at};
use crate::environment::{project, quota, xfs};

/// The number of files in a directory. It is large enough that the walk reports progress while it is among
/// them.
pub(super) const FILES: u64 = 1100;

/// Names that sort after `b` in a directory of the tree. A directory outside has them as well, and a walk
/// that goes up into the wrong directory finds them there.
pub(super) fn later_names() -> impl Iterator<Item = String> {
    (0..20).map(|n| format!("later {n}"))
}

fn make_later_names(directory: &Path) {
    for name in later_names() {
        File::create(directory.join(name)).unwrap();
    }
}

/// Creates `tree/a/b` with files in it, further names in `tree` and in `tree/a`, and the same outside.
pub(super) fn populate(fixture: &Fixture) {
    let b = fixture.tree().join("a/b");
    fs::create_dir_all(&b).unwrap();
    for n in 0..FILES {
        File::create(b.join(format!("{n}"))).unwrap();
    }
    for directory in [fixture.tree(), fixture.tree().join("a"), fixture.outside()] {
        make_later_names(&directory);
    }
}

/// Checks that neither the directory nor its original entries are in a project.
fn assert_untouched(directory: &Path) {
    assert_eq!(project_at(directory), 0, "{directory:?}");
    for name in later_names() {
        assert_eq!(project_at(&directory.join(&name)), 0, "{name} of {directory:?}");
    }
}

/// Tags the tree and calls `act` once while the walk is in `tree/a/b`.
fn tag_and_act(fixture: &Fixture, act: impl FnOnce()) -> TreeReport {
    let mut act = Some(act);
    let report = tag_tree(File::open(fixture.tree()).unwrap(), fixture.id, HardLinks::Skip, |_| {
        if let Some(act) = act.take() {
            act();
        }
    });
    assert!(act.is_none(), "the walk ended before `act` was called");
    report.unwrap()
}

/// The directory is moved out of the tree while the walk is in it, alone or with its parent.
#[rstest]
#[case::alone("a/b", "b")]
#[case::with_its_parent("a", "a")]
fn walks_stay_inside_after_a_move(#[case] from: &str, #[case] to: &str) {
    let fixture = Fixture::new(5301);
    populate(&fixture);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    let before = fingerprint(&outside.join("directory"));
    tag_and_act(&fixture, || fs::rename(tree.join(from), outside.join(to)).unwrap());
    assert_eq!(fingerprint(&outside.join("directory")), before);
    assert_untouched(&outside);
    assert!(fixture.check().is_clean());
}

#[test]
fn another_pass_tags_a_replacement() {
    let fixture = Fixture::new(5303);
    populate(&fixture);
    let tree = fixture.tree();
    let report = tag_and_act(&fixture, || {
        fs::rename(tree.join("a/b"), fixture.outside().join("b")).unwrap();
        fs::rename(tree.join("a"), fixture.outside().join("a")).unwrap();
        fs::create_dir(tree.join("a")).unwrap();
        fs::create_dir(tree.join("a/c")).unwrap();
        fs::write(tree.join("a/c/file"), "").unwrap();
        // The new directory leaves the project, so that only a further pass can find it.
        clear_tree(File::open(tree.join("a")).unwrap(), fixture.id).unwrap();
    });
    assert_eq!(project_at(&tree.join("a/c/file")), 5303, "{report:?}");
    // One pass was disturbed, one changed entries, and one found the tree stable.
    assert_eq!(report.passes, 3);
    assert!(fixture.check().is_clean());
    assert_untouched(&fixture.outside());
}

#[test]
fn a_check_reports_concurrent_modification() {
    let fixture = Fixture::new(5307);
    populate(&fixture);
    fixture.tag().unwrap();
    let tree = fixture.tree();
    let mut replaced = false;
    let check = check_tree(File::open(&tree).unwrap(), fixture.id, |_| {
        if !std::mem::replace(&mut replaced, true) {
            fs::rename(tree.join("a/b"), tree.join("b")).unwrap();
            fs::rename(tree.join("a"), fixture.outside().join("a")).unwrap();
            fs::create_dir(tree.join("a")).unwrap();
            make_later_names(&tree.join("a"));
        }
    });
    assert!(replaced && check.unwrap().disturbed);
    let check = fixture.check();
    assert!(check.is_clean() && !check.disturbed, "{check:?}");
}

/// Another directory has the inode number of the removed parent.
#[test]
fn a_reused_inode_number_is_noticed() {
    let fixture = Fixture::new(5304);
    populate(&fixture);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    let number = fs::metadata(tree.join("a")).unwrap().ino();
    let root = File::open(xfs()).unwrap();
    let mut decoy = None;
    tag_and_act(&fixture, || {
        fs::rename(tree.join("a/b"), outside.join("b")).unwrap();
        fs::remove_dir_all(tree.join("a")).unwrap();
        quota(&root).finish_inactivation(fixture.id).unwrap();
        for n in 0..4096 {
            // XFS places new directories of one parent in its allocation groups in turn.
            let path = outside.join(format!("directory/{n}"));
            fs::create_dir(&path).unwrap();
            if fs::metadata(&path).unwrap().ino() == number {
                decoy = Some(path);
                break;
            }
        }
        let decoy = decoy.as_ref().expect("a directory with the same number");
        make_later_names(decoy);
        fs::rename(outside.join("b"), decoy.join("b")).unwrap();
    });
    let decoy = decoy.unwrap();
    assert_untouched(&decoy);
    assert_eq!(project_at(&decoy.join("b")), 5304, "the directory was in the tree when the walk entered it");
}

/// Renames entries continuously until `until` is set, and ignores refused renames: while the tree is being
/// tagged, the kernel refuses some with EXDEV.
fn rename_at_random(tree: &Path, outside: &Path, until: &AtomicBool) -> u64 {
    let mut renamed = 0;
    let exchange = |one: &Path, other: &Path| {
        renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE).is_ok()
    };
    while !until.load(Ordering::Relaxed) {
        // A directory and a link that leads out of the tree change places.
        renamed += u64::from(exchange(&tree.join("a"), &tree.join("link")));
        // A file and a directory change places.
        renamed += u64::from(exchange(&tree.join("c/file"), &tree.join("c/directory")));
        // A directory leaves the tree, and may come back.
        renamed += u64::from(fs::rename(tree.join("d/e"), outside.join("e")).is_ok());
        renamed += u64::from(fs::rename(outside.join("e"), tree.join("d/e")).is_ok());
        // A directory and its parent change places.
        renamed += u64::from(fs::rename(tree.join("f/g"), tree.join("g")).is_ok());
        renamed += u64::from(fs::rename(tree.join("f"), tree.join("g/f")).is_ok());
        renamed += u64::from(fs::rename(tree.join("g/f"), tree.join("f")).is_ok());
        renamed += u64::from(fs::rename(tree.join("g"), tree.join("f/g")).is_ok());
    }
    renamed
}

/// Runs `walk` while entries of the tree are renamed at random.
pub(super) fn while_renaming(fixture: &Fixture, walk: impl FnOnce()) {
    let (tree, outside) = (fixture.tree(), fixture.outside());
    for directory in ["a/b", "c/directory/below", "d/e/below", "f/g/below"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
        for n in 0..20 {
            File::create(tree.join(directory).join(format!("{n}"))).unwrap();
        }
    }
    File::create(tree.join("c/file")).unwrap();
    symlink(&outside, tree.join("link")).unwrap();
    let ended = AtomicBool::new(false);
    let renamed = std::thread::scope(|scope| {
        let renaming = scope.spawn(|| rename_at_random(&tree, &outside, &ended));
        walk();
        ended.store(true, Ordering::Relaxed);
        renaming.join().unwrap()
    });
    assert!(renamed > 0, "nothing was renamed");
}

#[test]
fn concurrent_renames_never_change_anything_outside() {
    let fixture = Fixture::new(5305);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    let decoys = [outside.join("directory"), outside.join("file")];
    let before = decoys.each_ref().map(|path| (fs::metadata(path).unwrap().ctime_nsec(), project_at(path)));
    let other = project(5306);
    let root = File::open(&tree).unwrap();
    while_renaming(&fixture, || {
        for round in 0..40 {
            let id = if round % 2 == 0 { fixture.id } else { other };
            match tag_tree(&root, id, HardLinks::Skip, |_| {}) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
            }
            check_tree(&root, id, |_| {}).unwrap();
        }
    });
    let after = decoys.each_ref().map(|path| (fs::metadata(path).unwrap().ctime_nsec(), project_at(path)));
    assert_eq!(after, before);
    assert_eq!(project_at(&outside), 0);
    assert_eq!(project_at(&outside.join("directory/file")), 0);
    fixture.tag().unwrap();
    assert!(fixture.check().is_clean());
}
