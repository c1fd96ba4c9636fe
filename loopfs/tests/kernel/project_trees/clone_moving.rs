//! Clones of trees whose owner moves what is in them meanwhile.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use loopfs::project_tree::{CloneReport, clone_tree, clone_tree_reporting};

use super::moving::{FILES, later_names, plant, rename_at_random};
use super::portrait::{assert_alike, portray};
use super::{Scene, fingerprint};

/// Clones the tree, and acts once while the walk is in `tree/a/b`.
fn clone_and_act(scene: &Scene, act: impl FnOnce()) -> CloneReport {
    let mut act = Some(act);
    let copy = scene.empty_copy();
    let report = clone_tree_reporting(
        File::open(scene.tree()).unwrap().as_fd(),
        File::open(&copy).unwrap().as_fd(),
        &mut |_| {
            if let Some(act) = act.take() {
                act();
            }
        },
    );
    assert!(act.is_none(), "nobody acted");
    report.unwrap()
}

fn count(directory: &Path) -> u64 {
    fs::read_dir(directory).unwrap().count() as u64
}

#[test]
fn a_directory_moved_out_is_cloned_to_its_end_and_nothing_beside_where_it_is() {
    let scene = Scene::new(5431);
    plant(&scene);
    let (tree, outside) = (scene.tree(), scene.outside());
    let before = fingerprint(&outside.join("directory"));
    let report = clone_and_act(&scene, || fs::rename(tree.join("a/b"), outside.join("b")).unwrap());
    assert_eq!(fingerprint(&outside.join("directory")), before);
    let copy = scene.directory.path().join("copy");
    assert_eq!(count(&copy.join("a/b")), FILES);
    // Back above it, the walk goes on in the tree.
    assert_eq!(count(&copy.join("a")), later_names().count() as u64 + 1);
    assert_eq!(count(&copy), later_names().count() as u64 + 1);
    assert!(!report.disturbed && report.skipped.is_empty(), "{report:?}");
    scene.end();
}

#[test]
fn a_clone_says_that_it_may_not_be_whole_and_closes_what_it_left() {
    let scene = Scene::new(5432);
    plant(&scene);
    let (tree, outside) = (scene.tree(), scene.outside());
    fs::set_permissions(tree.join("a"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    super::clone::set_times(&tree.join("a/b"), (1, 2), (3, 4));
    let report = clone_and_act(&scene, || {
        fs::rename(tree.join("a/b"), outside.join("b")).unwrap();
        fs::rename(tree.join("a"), outside.join("a")).unwrap();
    });
    assert!(report.disturbed && !report.is_complete());
    let copy = scene.directory.path().join("copy");
    let status = fs::metadata(copy.join("a/b")).unwrap();
    let modified = status.modified().unwrap().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(modified, std::time::Duration::new(3, 4), "as it was when it was entered");
    assert_eq!(count(&copy), later_names().count() as u64 + 1, "the root to its end");
    scene.end();
}

#[test]
fn nothing_outside_is_cloned_whatever_is_renamed_meanwhile() {
    let scene = Scene::new(5433);
    let (tree, outside) = (scene.tree(), scene.outside());
    for directory in ["a/b", "c/directory/below", "d/e/below", "f/g/below"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
        for n in 0..20 {
            File::create(tree.join(directory).join(format!("{n}"))).unwrap();
        }
    }
    File::create(tree.join("c/file")).unwrap();
    symlink(&outside, tree.join("link")).unwrap();
    let secret = outside.join("directory/secret");
    fs::write(&secret, "another tenant's").unwrap();
    let root = File::open(&tree).unwrap();
    let ended = AtomicBool::new(false);
    let renamed = std::thread::scope(|scope| {
        let renaming = scope.spawn(|| rename_at_random(&tree, &outside, &ended));
        for round in 0..60 {
            let copy = scene.directory.path().join(format!("copy {round}"));
            fs::create_dir(&copy).unwrap();
            let report = clone_tree(root.as_fd(), File::open(&copy).unwrap().as_fd()).unwrap();
            assert_eq!(report.skipped.refused, 0, "{report:?}");
            for (name, portrait) in portray(&copy) {
                assert!(!name.ends_with("secret"), "{portrait:?}");
            }
            fs::remove_dir_all(&copy).unwrap();
        }
        ended.store(true, Ordering::Relaxed);
        renaming.join().unwrap()
    });
    assert!(renamed > 0, "nothing was renamed");
    let expected = portray(&tree);
    let (copy, report) = scene.clone();
    assert!(report.is_complete(), "{report:?}");
    assert_alike(&portray(&copy), &expected);
    drop(root);
    scene.end();
}
