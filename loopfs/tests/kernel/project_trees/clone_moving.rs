//! Tests of clones of trees whose owner moves entries during the walk.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

use loopfs::project_tree::{CloneReport, clone_tree};

use super::moving::{FILES, later_names, populate, while_renaming};
use super::portrait::{assert_equal_trees, read_tree_metadata};
use super::{Fixture, fingerprint};

/// Clones the tree and calls `act` once while the walk is in `tree/a/b`.
fn clone_and_act(fixture: &Fixture, act: impl FnOnce()) -> CloneReport {
    let mut act = Some(act);
    let copy = fixture.empty_copy();
    let report = clone_tree(File::open(fixture.tree()).unwrap(), File::open(&copy).unwrap(), |_| {
        if let Some(act) = act.take() {
            act();
        }
    });
    assert!(act.is_none(), "the walk ended before `act` was called");
    report.unwrap()
}

fn count(directory: &Path) -> u64 {
    fs::read_dir(directory).unwrap().count() as u64
}

/// The clone has none of the new siblings of the directory.
#[test]
fn a_moved_directory_is_cloned_completely() {
    let fixture = Fixture::new(5431);
    populate(&fixture);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    let before = fingerprint(&outside.join("directory"));
    let report = clone_and_act(&fixture, || fs::rename(tree.join("a/b"), outside.join("b")).unwrap());
    assert_eq!(fingerprint(&outside.join("directory")), before);
    let copy = fixture.directory.path().join("copy");
    assert_eq!(count(&copy.join("a/b")), FILES);
    // When the walk leaves the moved directory, it continues in the tree.
    assert_eq!(count(&copy.join("a")), later_names().count() as u64 + 1);
    assert_eq!(count(&copy), later_names().count() as u64 + 1);
    assert!(!report.disturbed && report.skipped.is_empty(), "{report:?}");
}

/// The clone still completes the directories that the walk has left.
#[test]
fn concurrent_modification_is_reported() {
    let fixture = Fixture::new(5432);
    populate(&fixture);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    fs::set_permissions(tree.join("a"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    super::clone::set_times(&tree.join("a/b"), (1, 2), (3, 4));
    let report = clone_and_act(&fixture, || {
        fs::rename(tree.join("a/b"), outside.join("b")).unwrap();
        fs::rename(tree.join("a"), outside.join("a")).unwrap();
    });
    assert!(report.disturbed && !report.is_complete());
    let copy = fixture.directory.path().join("copy");
    let status = fs::metadata(copy.join("a/b")).unwrap();
    let modified = status.modified().unwrap().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(
        modified,
        std::time::Duration::new(3, 4),
        "the times are those of the directory when the walk entered it"
    );
    assert_eq!(count(&copy), later_names().count() as u64 + 1, "the root is cloned completely");
}

#[test]
fn concurrent_renames_never_clone_anything_outside() {
    let fixture = Fixture::new(5433);
    let (tree, outside) = (fixture.tree(), fixture.outside());
    symlink(outside.join("file"), tree.join("link to a file")).unwrap();
    let secret = outside.join("directory/secret");
    fs::write(&secret, "another tenant's").unwrap();
    let root = File::open(&tree).unwrap();
    while_renaming(&fixture, || {
        for round in 0..20 {
            let copy = fixture.directory.path().join(format!("copy {round}"));
            fs::create_dir(&copy).unwrap();
            let report = clone_tree(&root, File::open(&copy).unwrap(), |_| {}).unwrap();
            assert_eq!(report.skipped.refused, 0, "{report:?}");
            for (name, entry) in read_tree_metadata(&copy) {
                assert!(!name.ends_with("secret"), "{entry:?}");
            }
            fs::remove_dir_all(&copy).unwrap();
        }
    });
    let expected = read_tree_metadata(&tree);
    let (copy, report) = fixture.clone();
    assert!(report.is_complete(), "{report:?}");
    assert_equal_trees(&read_tree_metadata(&copy), &expected);
}
