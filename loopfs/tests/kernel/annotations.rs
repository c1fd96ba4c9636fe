//! Tests of what the creator of a volume notes about it, and of pending volumes.

use std::fs::File;
use std::path::PathBuf;

use loopfs::mount::unmount;
use loopfs::volume_store::{
    Annotations, ContentSource, StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore,
};
use loopfs::{Bytes, ErrorKind};
use nix::fcntl::{FallocateFlags, fallocate};
use rstest::rstest;
use rustix::fs::{XattrFlags, setxattr};

use crate::disk::{Disk, MIN_SIZE};
use crate::environment::{Leaks, MIB, id, scratch, snapshot_id, store, xfs};
use crate::fixtures::{TestStore, delete_all, remove};

fn annotations(claim: &str) -> Annotations {
    Annotations::new([("claim", claim), ("class", "fast")]).unwrap()
}

fn pending(kind: VolumeKind, claim: &str) -> VolumeSpec {
    VolumeSpec { annotations: annotations(claim), pending: true, ..VolumeSpec::new(kind, Bytes(MIB)) }
}

fn pending_ids(store: &VolumeStore) -> Vec<VolumeId> {
    store.pending().unwrap().into_iter().map(|(id, _)| id).collect()
}

#[rstest]
fn a_volume_is_pending_until_confirmed(
    #[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind,
) {
    let (creator, other) = (TestStore::open(), store());
    // Reads all volumes before the first one is created.
    assert_eq!(creator.pending().unwrap(), []);
    let volume = creator.create(&id("a"), &pending(kind, "shop/data")).unwrap();
    assert_eq!(volume.annotations().unwrap(), annotations("shop/data"));
    assert!(volume.is_pending().unwrap());
    for store in [&creator, &other] {
        assert_eq!(store.pending().unwrap(), [(id("a"), annotations("shop/data"))]);
    }

    creator.confirm(&id("a")).unwrap();
    creator.confirm(&id("a")).unwrap();
    for store in [&creator, &other, &crate::environment::store()] {
        assert_eq!(store.pending().unwrap(), []);
        let volume = store.volume(&id("a")).unwrap();
        assert_eq!(volume.annotations().unwrap(), annotations("shop/data"));
        assert!(!volume.is_pending().unwrap());
    }
    drop(volume);
    remove(&creator, &id("a"));
    assert_eq!(creator.confirm(&id("a")).unwrap_err().kind(), ErrorKind::NotFound);
}

/// Another process has read all volumes before the first one creates the volume, and then repeats the creation.
#[test]
fn a_repeated_creation_is_pending_too() {
    let (creator, other) = (TestStore::open(), store());
    assert_eq!(other.pending().unwrap(), []);
    let spec = pending(VolumeKind::Filesystem, "shop/data");
    creator.create(&id("a"), &spec).unwrap();
    other.create(&id("a"), &spec).unwrap();
    assert_eq!(pending_ids(&other), [id("a")]);
}

#[rstest]
fn creating_without_pending_confirms(#[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind) {
    let store = TestStore::open();
    store.create(&id("a"), &pending(kind, "shop/data")).unwrap();
    store.create(&id("a"), &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
    assert_eq!(store.pending().unwrap(), []);
}

#[rstest]
fn an_existing_volume_keeps_its_annotations(
    #[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind,
) {
    let store = TestStore::open();
    store.create(&id("a"), &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
    let repeated = store.create(&id("a"), &pending(kind, "shop/data")).unwrap();
    assert_eq!(repeated.annotations().unwrap(), Annotations::default());
    assert!(!repeated.is_pending().unwrap(), "a volume that may hold data became pending");
    drop(repeated);
    assert_eq!(store.pending().unwrap(), []);
}

#[rstest]
fn copies_have_only_their_own_annotations(
    #[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind,
) {
    let store = TestStore::open();
    store.create(&id("source"), &pending(kind, "shop/source")).unwrap();
    let snapshot = snapshot_id("s");
    store.create_snapshot(&id("source"), &snapshot).unwrap();
    let (source, plain) = (id("source"), VolumeSpec::new(kind, Bytes(MIB)));
    let clone = store.clone_from(ContentSource::Volume(&source), &id("plain"), &plain).unwrap();
    assert_eq!(clone.annotations().unwrap(), Annotations::default());
    assert!(!clone.is_pending().unwrap());
    drop(clone);
    let clone = store
        .clone_from(ContentSource::Snapshot(&snapshot), &id("noted"), &pending(kind, "shop/copy"))
        .unwrap();
    assert_eq!(clone.annotations().unwrap(), annotations("shop/copy"));
    drop(clone);
    assert_eq!(pending_ids(&store), [id("noted"), id("source")]);
    delete_all(&store);
    assert_eq!(store.pending().unwrap(), []);
}

/// The volume has one block, which the annotations take from a directory, and the file system is full.
#[rstest]
fn long_annotations_fit_small_volumes(#[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind) {
    let _leaks = Leaks::watch();
    let (disk, parent) = (Disk::formatted(MIN_SIZE), scratch());
    let data = parent.path().join("data");
    std::fs::create_dir(&data).unwrap();
    disk.mount(&data);
    let store = VolumeStore::open(&data, StoreOptions::default()).unwrap();
    let longest = Annotations::new([("claim", "x".repeat(Annotations::MAX_LENGTH - 6))]).unwrap();
    let spec =
        VolumeSpec { annotations: longest.clone(), pending: true, ..VolumeSpec::new(kind, Bytes(4096)) };
    store.create(&id("least"), &spec).unwrap();
    if kind == VolumeKind::Filesystem {
        fill(data.join("volumes/least/file"));
    }
    fill(data.join("of-another-program"));
    assert_eq!(store.pending().unwrap(), [(id("least"), longest.clone())]);
    store.confirm(&id("least")).unwrap();
    let volume = store.volume(&id("least")).unwrap();
    assert_eq!((volume.annotations().unwrap(), volume.is_pending().unwrap()), (longest, false));
    assert_eq!(volume.capacity(), Bytes(4096));
    drop((volume, store));
    unmount(&data).unwrap();
}

/// Allocates blocks until there is no space, if there is any.
fn fill(path: PathBuf) {
    let Ok(file) = File::create(path) else { return };
    let mut end = 0;
    for size in [1 << 20, 4096] {
        while fallocate(&file, FallocateFlags::empty(), end, size).is_ok() {
            end += size;
        }
    }
}

#[test]
fn invalid_annotations_hide_no_volume() {
    let store = TestStore::open();
    for name in ["a", "b"] {
        store.create(&id(name), &pending(VolumeKind::Filesystem, "shop/data")).unwrap();
    }
    let name = "trusted.loopfs.annotations";
    setxattr(xfs().join("volumes/a"), name, b"claim=a\nb uid", XattrFlags::empty()).unwrap();
    assert_eq!(store.volume(&id("a")).unwrap().annotations().unwrap_err().kind(), ErrorKind::Other);
    assert_eq!(pending_ids(&store), [id("b")]);
}
