//! Tests of what a crash leaves at each step of an operation. Recovery removes exactly that.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use loopfs::project_quota::{Limits, ProjectId, assign_project};
use loopfs::volume_store::{Recovered, StoreOptions, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, ErrorKind, Inodes};
use nix::fcntl::{FallocateFlags, fallocate};

use crate::environment::{MIB, default_with, id, project, quota, store, xfs};
use crate::fixtures::{TestStore, assert_fails};

const OURS: u32 = 0x4c00_0123;

fn reserve(id: u32) -> ProjectId {
    let root = File::open(xfs()).unwrap();
    let project = project(id);
    quota(&root).set_limits(project, Limits::hard(Bytes(MIB), Inodes(512))).unwrap();
    project
}

/// The process crashed after it created or tagged the directory.
#[test]
fn unfinished_directories_are_recovered() {
    let store = TestStore::open();
    std::fs::create_dir(xfs().join("staging/untagged.0")).unwrap();
    std::fs::create_dir(xfs().join("staging/tagged.1")).unwrap();
    assign_project(File::open(xfs().join("staging/tagged.1")).unwrap(), reserve(OURS)).unwrap();
    assert_eq!(
        store.recover().unwrap(),
        default_with(|found: &mut Recovered| (found.unfinished, found.released_ids) = (2, 1))
    );
}

/// The process crashed after it allocated the blocks and before it extended the file.
#[test]
fn an_unfinished_expansion_is_recovered() {
    let store = TestStore::open();
    store.create(&id("grown"), &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    let image = File::options().write(true).open(xfs().join("volumes/grown")).unwrap();
    fallocate(&image, FallocateFlags::FALLOC_FL_KEEP_SIZE, MIB as i64, MIB as i64).unwrap();
    assert_eq!(image.metadata().unwrap().blocks() * 512, 2 * MIB);
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.eof_blocks_freed = 1));
    assert_eq!(image.metadata().unwrap().blocks() * 512, MIB);
    assert_eq!(store.recover().unwrap(), Recovered::default(), "a second recovery finds nothing to do");
}

/// The process crashed after it moved the volume to the trash.
#[test]
fn emptying_the_trash_completes_a_deletion() {
    let store = TestStore::open();
    store.create(&id("deleted"), &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    File::create(xfs().join("volumes/deleted/file")).unwrap();
    assert!(store.delete(&id("deleted")).unwrap());
    let restarted = crate::environment::store();
    let recovered = restarted.recover().unwrap();
    assert_eq!(recovered, Recovered::default(), "a directory in the trash still has the id");
    assert_eq!(restarted.empty_trash().unwrap(), 1);
}

/// The process crashed after it reserved the id, or after it removed the directory and before it freed the id.
#[test]
fn an_id_without_directory_is_recovered() {
    let store = TestStore::open();
    reserve(OURS + 1);
    store.create(&id("other"), &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    let before = store.space().unwrap().available.0;
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.released_ids = 1));
    // The tolerance is for a block that the quota's own records may take.
    let after = store.space().unwrap().available.0;
    assert!(after >= before + MIB - 64 * 1024, "{after} after {before}: the space can be reserved again");
    assert_eq!(store.recover().unwrap(), Recovered::default(), "a second recovery finds nothing to do");
    let capacity = store.volume(&id("other")).unwrap().capacity();
    assert_eq!(capacity, Bytes(MIB), "an existing volume lost its limit");
}

#[test]
fn an_id_with_files_stays_allocated() {
    let store = store();
    let project = reserve(OURS + 2);
    let stray = tempfile::tempdir_in(xfs()).unwrap();
    assign_project(File::open(stray.path()).unwrap(), project).unwrap();
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.busy_ids = 1));
    stray.close().unwrap();
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.released_ids = 1));
}

#[test]
fn a_later_format_is_refused() {
    drop(store());
    let format = xfs().join(".loopfs/format");
    let known = std::fs::read(&format).unwrap();
    let later = "loopfs store 2\n";
    std::fs::write(&format, later).unwrap();
    let results =
        [VolumeStore::open, VolumeStore::open_existing].map(|open| open(&xfs(), StoreOptions::default()));
    let found = std::fs::read_to_string(&format);
    // Before anything can panic, because the other tests use this store.
    std::fs::write(&format, known).unwrap();
    for error in results.map(Result::unwrap_err) {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let message = error.to_string();
        assert!(message.contains("loopfs store 2") && message.contains("install the version"), "{message}");
    }
    assert_eq!(found.unwrap(), later);
    store().verify().unwrap();
}

#[test]
fn an_incomplete_store_is_completed() {
    drop(store());
    std::fs::remove_file(xfs().join(".loopfs/format")).unwrap();
    let record =
        xfs().with_file_name(format!("{}.filesystem-uuid", xfs().file_name().unwrap().to_str().unwrap()));
    std::fs::remove_file(&record).unwrap();
    crate::environment::store().verify().unwrap();
    assert!(record.exists());

    // The record exists, so a missing store directory was lost. Opening the store reports the loss.
    std::fs::remove_file(xfs().join(".loopfs/format")).unwrap();
    assert_fails(VolumeStore::open(&xfs(), StoreOptions::default()), ErrorKind::NotFound);
    std::fs::remove_file(&record).unwrap();
    crate::environment::store();
}
