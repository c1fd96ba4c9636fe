use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::SystemTime;

use loopfs::volume_store::{
    ContentSource, OwnedContentSource, Snapshot, SnapshotId, Volume, VolumeKind, VolumeSpec, VolumeStore,
};
use loopfs::{Bytes, ErrorKind};
use rstest::rstest;

use crate::environment::{
    MIB, assert_close, available_after_recount, clone_image, id, snapshot_id, store, wait_for_deferred_frees,
    xfs,
};
use crate::fixtures::{
    TestStore, assert_available, assert_fails, create_image, delete, delete_all, margin, open_image, remove,
    reserve_rest, write_scattered,
};

fn restore(store: &VolumeStore, snapshot: &SnapshotId, name: &str, size: u64) -> loopfs::Result<Volume> {
    let spec = VolumeSpec::new(VolumeKind::Block, Bytes(size));
    store.clone_from(ContentSource::Snapshot(snapshot), &id(name), &spec)
}

fn fill(image: &File, size: u64, seed: u8) {
    image.write_all_at(&vec![seed; size as usize], 0).unwrap();
}

#[track_caller]
fn assert_filled(image: &File, size: u64, seed: u8) {
    let mut found = vec![0; size as usize];
    image.read_exact_at(&mut found, 0).unwrap();
    assert!(found.iter().all(|byte| *byte == seed), "not {seed} throughout");
}

fn inode(snapshot: &Snapshot) -> u64 {
    std::fs::symlink_metadata(xfs().join("snapshots").join(snapshot.id().as_str())).unwrap().ino()
}

#[test]
fn a_snapshot_outlives_its_volume() {
    let store = TestStore::open();
    let (source, image) = create_image(&store, "source", 4 * MIB);
    // The data is only in the page cache.
    fill(&image, 4 * MIB, 1);
    let earlier = SystemTime::now();
    let snapshot = store.create_snapshot(&source, &snapshot_id("one")).unwrap();
    assert_eq!((snapshot.id(), snapshot.source()), (&snapshot_id("one"), &source));
    assert_eq!((snapshot.kind(), snapshot.capacity()), (VolumeKind::Block, Bytes(4 * MIB)));
    assert!((earlier..=SystemTime::now()).contains(&snapshot.created()), "{:?}", snapshot.created());
    assert_eq!(snapshot.used().unwrap(), Bytes(4 * MIB));
    // A snapshot is not a volume, and its id is not a volume id.
    assert_eq!(store.snapshots().unwrap(), [snapshot_id("one")]);
    assert_eq!(store.list().unwrap(), [id("source")]);
    assert_eq!(store.volume(&id("one")).unwrap_err().kind(), ErrorKind::NotFound);

    fill(&image, 4 * MIB, 2);
    store.expand(&source, Bytes(6 * MIB)).unwrap();
    let later = store.create_snapshot(&source, &snapshot_id("source")).unwrap();
    assert_eq!(later.capacity(), Bytes(6 * MIB));
    drop(image);
    remove(&store, &id("source"));
    let reread = crate::environment::store();
    let reread = reread.snapshot(&snapshot_id("one")).unwrap();
    assert_eq!((reread.source(), reread.capacity()), (&source, Bytes(4 * MIB)));
    assert_eq!(reread.created(), snapshot.created());

    for (snapshot, size, seed) in [(&snapshot, 4 * MIB, 1), (&later, 6 * MIB, 2)] {
        let restored = restore(&store, snapshot.id(), "restored", size + MIB).unwrap();
        let recorded = Some(OwnedContentSource::Snapshot(snapshot.id().clone()));
        assert_eq!((restored.capacity(), restored.source().unwrap()), (Bytes(size + MIB), recorded));
        let image = open_image(&restored);
        assert_filled(&image, 4 * MIB, seed);
        assert_eq!(image.metadata().unwrap().blocks() * 512, size + MIB, "all of it is preallocated");
        fill(&image, size, 3);
        drop((image, restored));
        remove(&store, &id("restored"));
    }
    let restored = restore(&store, snapshot.id(), "restored", 4 * MIB).unwrap();
    assert_filled(&open_image(&restored), 4 * MIB, 1);
    // A volume outlives the snapshot from which it was created.
    let ids = [snapshot.id().clone(), later.id().clone()];
    drop((snapshot, later, reread));
    delete(&store, &[], &ids);
    assert!(!store.delete_snapshot(&ids[0]).unwrap(), "deleting again succeeds and deletes nothing");
    assert_filled(&open_image(&restored), 4 * MIB, 1);
}

/// The call returns the snapshot even after its volume was deleted.
#[test]
fn repeating_a_snapshot_returns_it() {
    let store = TestStore::open();
    let (source, image) = create_image(&store, "source", MIB);
    let (other, _) = create_image(&store, "other", MIB);
    let (one, none) = (snapshot_id("one"), snapshot_id("none"));
    fill(&image, MIB, 1);
    let first = inode(&store.create_snapshot(&source, &one).unwrap());
    fill(&image, MIB, 2);
    assert_eq!(inode(&store.create_snapshot(&source, &one).unwrap()), first);
    let error = assert_fails(store.create_snapshot(&other, &one), ErrorKind::AlreadyExists);
    assert!(error.to_string().contains("a snapshot of volume source"), "{error}");

    restore(&store, &one, "restored", MIB).unwrap();
    let conflicts = [
        clone_image(&store, &source, &id("restored"), Bytes(MIB)).unwrap_err(),
        store.create(&id("restored"), &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap_err(),
        restore(&store, &one, "restored", 2 * MIB).unwrap_err(),
        restore(&store, &one, "source", MIB).unwrap_err(),
    ];
    for error in conflicts {
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        assert!(error.to_string().contains("a clone of snapshot one"), "{error}");
    }
    drop(image);
    remove(&store, &id("source"));
    assert_eq!(inode(&store.create_snapshot(&source, &one).unwrap()), first);
    delete(&store, &[], std::slice::from_ref(&one));
    // The volume existed before.
    assert_eq!(restore(&store, &one, "restored", MIB).unwrap().capacity(), Bytes(MIB));
    for error in [
        store.create_snapshot(&source, &one).unwrap_err(),
        store.snapshot(&none).unwrap_err(),
        restore(&store, &one, "another", MIB).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    assert_eq!(store.snapshots().unwrap(), []);
}

/// The volume has stopped sharing blocks in the meantime.
#[rstest]
#[case::whose_only_snapshot_was_deleted(true)]
#[case::that_was_overwritten(false)]
fn sharing_again_reserves_a_margin(#[case] deleted: bool) {
    const SIZE: u64 = 8 * MIB;
    let store = TestStore::open();
    let (source, image) = create_image(&store, "source", SIZE);
    fill(&image, SIZE, 1);
    image.sync_all().unwrap();
    let ids = [snapshot_id("one"), snapshot_id("two")];
    store.create_snapshot(&source, &ids[0]).unwrap();
    if deleted {
        assert!(store.delete_snapshot(&ids[0]).unwrap());
        store.empty_trash().unwrap();
    } else {
        fill(&image, SIZE, 2);
        image.sync_all().unwrap();
    }
    let without_margin = available_after_recount();
    store.create_snapshot(&source, &ids[1]).unwrap();
    let expected = without_margin - margin(SIZE) - SIZE;
    assert_available(&store, expected);
    drop(image);
}

/// The reservation of the snapshot is the size of the image, and its volume gets the margin.
#[test]
fn a_snapshot_reserves_size_and_margin() {
    const SIZE: u64 = 8 * MIB;
    wait_for_deferred_frees();
    let store = store();
    let available = || store.space().unwrap().available.0;
    let (source, image) = create_image(&store, "source", SIZE);
    fill(&image, SIZE, 1);
    image.sync_all().unwrap();
    let before = available();
    assert_close(available_after_recount(), before);
    let ids = [snapshot_id("one"), snapshot_id("two")];
    for (taken, id) in ids.iter().enumerate() {
        store.create_snapshot(&source, id).unwrap();
        let expected = before - margin(SIZE) - SIZE * (taken as u64 + 1);
        assert_available(&store, expected);
    }
    // After it was overwritten, the volume shares nothing any more.
    fill(&image, SIZE, 2);
    image.sync_all().unwrap();
    assert_close(available_after_recount(), before - 2 * SIZE);
    restore(&store, &ids[0], "restored", SIZE).unwrap();
    assert_available(&store, before - margin(SIZE) - 3 * SIZE);
    // The deleted snapshot stays reserved until the trash is emptied.
    assert!(store.delete_snapshot(&ids[0]).unwrap());
    assert_close(available_after_recount(), before - margin(SIZE) - 3 * SIZE);
    store.empty_trash().unwrap();
    // The volume that was created from one snapshot shares its blocks with the other one.
    assert_available(&store, before - margin(SIZE) - 2 * SIZE);
    drop(image);
    delete_all(&store);
    assert_available(&store, before + SIZE);
}

/// The file system has no unreserved space at that time.
#[test]
fn overwriting_the_volume_keeps_the_snapshot() {
    const SIZE: u64 = 8 * MIB;
    let store = TestStore::open();
    let (source, image) = create_image(&store, "source", SIZE);
    fill(&image, SIZE, 1);
    image.sync_all().unwrap();
    let one = snapshot_id("one");
    store.create_snapshot(&source, &one).unwrap();
    reserve_rest();
    write_scattered(&image, SIZE, |_| vec![2; 4096]);
    drop(image);
    delete(&store, &[id("source"), id("rest")], &[]);
    assert_filled(&open_image(&restore(&store, &one, "restored", SIZE).unwrap()), SIZE, 1);
}

#[test]
fn opening_anything_but_a_snapshot_fails() {
    let store = TestStore::open();
    let (source, _) = create_image(&store, "source", MIB);
    store.create_snapshot(&source, &snapshot_id("one")).unwrap();
    std::fs::copy(xfs().join("snapshots/one"), xfs().join("snapshots/foreign")).unwrap();
    std::os::unix::fs::symlink("one", xfs().join("snapshots/link")).unwrap();
    for name in ["foreign", "link"] {
        let error = assert_fails(store.snapshot(&snapshot_id(name)), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(name), "{error}");
        std::fs::remove_file(xfs().join("snapshots").join(name)).unwrap();
    }
}
