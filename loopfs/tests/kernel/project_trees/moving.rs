//! Trees whose owner moves what is in them while they are walked through.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use loopfs::ErrorKind;
use loopfs::project_quota::ProjectId;
use loopfs::project_tree::{
    TagOptions, TreeReport, audit_tree, audit_tree_reporting, tag_tree, tag_tree_reporting,
};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::{Scene, fingerprint, project_at};
use crate::environment::{quota, xfs};

/// As many files as make the walk report while it is among them.
pub(super) const FILES: u64 = 1500;

/// Names that a directory of the tree has after `b`, and one outside as well: a walk that goes up into the wrong
/// directory finds them there.
pub(super) fn later_names() -> impl Iterator<Item = String> {
    (0..20).map(|n| format!("later {n}"))
}

fn make_later_names(directory: &Path) {
    for name in later_names() {
        File::create(directory.join(name)).unwrap();
    }
}

/// `tree/a/b` with files in it, in `tree` and in `tree/a` further names, and the same outside.
pub(super) fn plant(scene: &Scene) {
    let b = scene.tree().join("a/b");
    fs::create_dir_all(&b).unwrap();
    for n in 0..FILES {
        File::create(b.join(format!("{n}"))).unwrap();
    }
    for directory in [scene.tree(), scene.tree().join("a"), scene.outside()] {
        make_later_names(&directory);
    }
}

/// Neither the directory nor what was always in it is in a project.
fn assert_untouched(directory: &Path) {
    assert_eq!(project_at(directory), 0, "{directory:?}");
    for name in later_names() {
        assert_eq!(project_at(&directory.join(&name)), 0, "{name} of {directory:?}");
    }
}

/// Tags the tree, and acts once while the walk is in `tree/a/b`.
fn tag_and_act(scene: &Scene, act: impl FnOnce()) -> TreeReport {
    let mut act = Some(act);
    let report = tag_tree_reporting(
        File::open(scene.tree()).unwrap().as_fd(),
        scene.id,
        &TagOptions::default(),
        &mut |_| {
            if let Some(act) = act.take() {
                act();
            }
        },
    );
    assert!(act.is_none(), "nobody acted");
    report.unwrap()
}

#[test]
fn a_directory_moved_out_does_not_lead_outside() {
    let scene = Scene::new(5301);
    plant(&scene);
    let (tree, outside) = (scene.tree(), scene.outside());
    let before = fingerprint(&outside.join("directory"));
    tag_and_act(&scene, || fs::rename(tree.join("a/b"), outside.join("b")).unwrap());
    assert_eq!(fingerprint(&outside.join("directory")), before);
    assert_untouched(&outside);
    assert!(scene.audit().is_clean());
    scene.end();
}

#[test]
fn a_directory_moved_out_with_the_one_above_does_not_lead_outside() {
    let scene = Scene::new(5302);
    plant(&scene);
    let (tree, outside) = (scene.tree(), scene.outside());
    let before = fingerprint(&outside.join("directory"));
    tag_and_act(&scene, || fs::rename(tree.join("a"), outside.join("a")).unwrap());
    assert_eq!(fingerprint(&outside.join("directory")), before);
    assert_untouched(&outside);
    assert!(scene.audit().is_clean());
    scene.end();
}

#[test]
fn what_takes_the_place_of_a_directory_is_tagged_in_another_pass() {
    let scene = Scene::new(5303);
    plant(&scene);
    let tree = scene.tree();
    let report = tag_and_act(&scene, || {
        fs::rename(tree.join("a/b"), scene.outside().join("b")).unwrap();
        fs::rename(tree.join("a"), scene.outside().join("a")).unwrap();
        fs::create_dir(tree.join("a")).unwrap();
        fs::create_dir(tree.join("a/c")).unwrap();
        fs::write(tree.join("a/c/file"), "").unwrap();
        // Out of the project, so that only a further pass can find it.
        loopfs::project_tree::clear_tree(File::open(tree.join("a")).unwrap().as_fd(), &TagOptions::default())
            .unwrap();
    });
    assert_eq!(project_at(&tree.join("a/c/file")), 5303, "{report:?}");
    assert_eq!(report.passes, 3, "disturbed, changed, quiet");
    assert!(scene.audit().is_clean());
    assert_untouched(&scene.outside());
    scene.end();
}

#[test]
fn an_audit_says_that_it_may_not_have_seen_everything() {
    let scene = Scene::new(5307);
    plant(&scene);
    scene.tag().unwrap();
    let tree = scene.tree();
    let mut replaced = false;
    let audit = audit_tree_reporting(File::open(&tree).unwrap().as_fd(), scene.id, &mut |_| {
        if !std::mem::replace(&mut replaced, true) {
            fs::rename(tree.join("a/b"), tree.join("b")).unwrap();
            fs::rename(tree.join("a"), scene.outside().join("a")).unwrap();
            fs::create_dir(tree.join("a")).unwrap();
            make_later_names(&tree.join("a"));
        }
    });
    assert!(replaced && audit.unwrap().disturbed);
    let audit = scene.audit();
    assert!(audit.is_clean() && !audit.disturbed, "{audit:?}");
    scene.end();
}

#[test]
fn a_directory_with_the_number_of_the_one_above_is_not_taken_for_it() {
    let scene = Scene::new(5304);
    plant(&scene);
    let (tree, outside) = (scene.tree(), scene.outside());
    let number = fs::metadata(tree.join("a")).unwrap().ino();
    let root = File::open(xfs()).unwrap();
    let mut decoy = None;
    tag_and_act(&scene, || {
        fs::rename(tree.join("a/b"), outside.join("b")).unwrap();
        fs::remove_dir_all(tree.join("a")).unwrap();
        quota(&root).finish_inactivation(scene.id).unwrap();
        for n in 0..4096 {
            // XFS gives new directories of one directory to its allocation groups in turn.
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
    assert_eq!(project_at(&decoy.join("b")), 5304, "it was in the tree");
    scene.end();
}

/// Renames all the time, what is refused left as it is: the tree is tagged in the midst of it (EXDEV).
pub(super) fn rename_at_random(tree: &Path, outside: &Path, until: &AtomicBool) -> u64 {
    let mut renamed = 0;
    let exchange = |one: &Path, other: &Path| {
        renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE).is_ok()
    };
    while !until.load(Ordering::Relaxed) {
        // A directory and a link out of the tree change places.
        renamed += u64::from(exchange(&tree.join("a"), &tree.join("link")));
        // A file and a directory do.
        renamed += u64::from(exchange(&tree.join("c/file"), &tree.join("c/directory")));
        // A directory goes out of the tree, and perhaps comes back.
        renamed += u64::from(fs::rename(tree.join("d/e"), outside.join("e")).is_ok());
        renamed += u64::from(fs::rename(outside.join("e"), tree.join("d/e")).is_ok());
        // The upper and the lower of two directories change places.
        renamed += u64::from(fs::rename(tree.join("f/g"), tree.join("g")).is_ok());
        renamed += u64::from(fs::rename(tree.join("f"), tree.join("g/f")).is_ok());
        renamed += u64::from(fs::rename(tree.join("g/f"), tree.join("f")).is_ok());
        renamed += u64::from(fs::rename(tree.join("g"), tree.join("f/g")).is_ok());
    }
    renamed
}

#[test]
fn nothing_outside_changes_whatever_is_renamed_meanwhile() {
    let scene = Scene::new(5305);
    let (tree, outside) = (scene.tree(), scene.outside());
    for directory in ["a/b", "c/directory/below", "d/e/below", "f/g/below"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
        for n in 0..20 {
            File::create(tree.join(directory).join(format!("{n}"))).unwrap();
        }
    }
    File::create(tree.join("c/file")).unwrap();
    symlink(&outside, tree.join("link")).unwrap();
    let decoys = [outside.join("directory"), outside.join("file")];
    let before = decoys.each_ref().map(|path| (fs::metadata(path).unwrap().ctime_nsec(), project_at(path)));
    let other = ProjectId::new(5306).unwrap();
    let root = File::open(&tree).unwrap();
    let ended = AtomicBool::new(false);
    let renamed = std::thread::scope(|scope| {
        let renaming = scope.spawn(|| rename_at_random(&tree, &outside, &ended));
        for round in 0..40 {
            let id = if round % 2 == 0 { scene.id } else { other };
            match tag_tree(root.as_fd(), id, &TagOptions::default()) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
            }
            audit_tree(root.as_fd(), id).unwrap();
        }
        ended.store(true, Ordering::Relaxed);
        renaming.join().unwrap()
    });
    assert!(renamed > 0, "nothing was renamed");
    let after = decoys.each_ref().map(|path| (fs::metadata(path).unwrap().ctime_nsec(), project_at(path)));
    assert_eq!(after, before);
    assert_eq!(project_at(&outside), 0);
    assert_eq!(project_at(&outside.join("directory/file")), 0);
    scene.tag().unwrap();
    assert!(scene.audit().is_clean());
    drop(root);
    scene.end();
}
