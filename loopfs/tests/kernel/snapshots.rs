use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::SystemTime;

use loopfs::loop_device::Access;
use loopfs::volume_store::{
    ContentSource, OwnedContentSource, Snapshot, SnapshotId, Volume, VolumeId, VolumeKind, VolumeSpec,
    VolumeStore,
};
use loopfs::{Bytes, ErrorKind};
use rstest::rstest;

use crate::environment::{
    Leaks, assert_close, available_after_recount, clone_image, id, store, wait_for_deferred_frees, xfs,
};

const MIB: u64 = 1 << 20;

fn snapshot_id(text: &str) -> SnapshotId {
    SnapshotId::parse(text).unwrap()
}

fn block(store: &VolumeStore, name: &str, size: u64) -> (VolumeId, File) {
    let id = id(name);
    let volume = store.create(&id, &VolumeSpec::new(VolumeKind::Block, Bytes(size))).unwrap();
    (id, open(&volume))
}

fn open(volume: &Volume) -> File {
    File::from(volume.open_image(Access::ReadWrite).unwrap())
}

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

fn remove(store: &VolumeStore, volumes: &[&str], snapshots: &[&SnapshotId]) {
    for name in volumes {
        assert!(store.delete(&id(name)).unwrap(), "{name}");
    }
    for id in snapshots {
        assert!(store.delete_snapshot(id).unwrap(), "{id}");
    }
    assert_eq!(store.empty_trash().unwrap(), volumes.len() + snapshots.len());
}

fn inode(snapshot: &Snapshot) -> u64 {
    std::fs::symlink_metadata(xfs().join("snapshots").join(snapshot.id().as_str())).unwrap().ino()
}

#[test]
fn a_snapshot_outlives_its_volume() {
    let leaks = Leaks::watch();
    let store = store();
    let (source, image) = block(&store, "source", 4 * MIB);
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
    remove(&store, &["source"], &[]);
    let reread = crate::environment::store();
    let reread = reread.snapshot(&snapshot_id("one")).unwrap();
    assert_eq!((reread.source(), reread.capacity()), (&source, Bytes(4 * MIB)));
    assert_eq!(reread.created(), snapshot.created());

    for (snapshot, size, seed) in [(&snapshot, 4 * MIB, 1), (&later, 6 * MIB, 2)] {
        let restored = restore(&store, snapshot.id(), "restored", size + MIB).unwrap();
        let recorded = Some(OwnedContentSource::Snapshot(snapshot.id().clone()));
        assert_eq!((restored.capacity(), restored.source().unwrap()), (Bytes(size + MIB), recorded));
        let image = open(&restored);
        assert_filled(&image, 4 * MIB, seed);
        assert_eq!(image.metadata().unwrap().blocks() * 512, size + MIB, "all of it is preallocated");
        fill(&image, size, 3);
        drop((image, restored));
        remove(&store, &["restored"], &[]);
    }
    let restored = restore(&store, snapshot.id(), "restored", 4 * MIB).unwrap();
    assert_filled(&open(&restored), 4 * MIB, 1);
    // A volume outlives the snapshot from which it was created.
    let ids = [snapshot.id().clone(), later.id().clone()];
    drop((snapshot, later, reread));
    remove(&store, &[], &[&ids[0], &ids[1]]);
    assert!(!store.delete_snapshot(&ids[0]).unwrap(), "deleting again succeeds and deletes nothing");
    assert_filled(&open(&restored), 4 * MIB, 1);
    drop(restored);
    remove(&store, &["restored"], &[]);
    leaks.check();
}

/// The call returns the snapshot even after its volume was deleted.
#[test]
fn repeating_a_snapshot_returns_it() {
    let store = store();
    let (source, image) = block(&store, "source", MIB);
    let (other, _) = block(&store, "other", MIB);
    let (one, none) = (snapshot_id("one"), snapshot_id("none"));
    fill(&image, MIB, 1);
    let first = inode(&store.create_snapshot(&source, &one).unwrap());
    fill(&image, MIB, 2);
    assert_eq!(inode(&store.create_snapshot(&source, &one).unwrap()), first);
    let error = store.create_snapshot(&other, &one).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
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
    remove(&store, &["source"], &[]);
    assert_eq!(inode(&store.create_snapshot(&source, &one).unwrap()), first);
    remove(&store, &[], &[&one]);
    assert_eq!(
        restore(&store, &one, "restored", MIB).unwrap().capacity(),
        Bytes(MIB),
        "the volume existed before"
    );
    for error in [
        store.create_snapshot(&source, &one).unwrap_err(),
        store.snapshot(&none).unwrap_err(),
        restore(&store, &one, "another", MIB).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    assert_eq!(store.snapshots().unwrap(), []);
    remove(&store, &["other", "restored"], &[]);
}

#[rstest]
#[case::smaller_than_it_was(VolumeKind::Block, 2 * MIB, ErrorKind::WouldShrink)]
#[case::as_a_directory(VolumeKind::Filesystem, 4 * MIB, ErrorKind::InvalidInput)]
#[case::of_no_size(VolumeKind::Block, 0, ErrorKind::InvalidInput)]
#[case::more_than_there_is(VolumeKind::Block, 1 << 40, ErrorKind::NoSpace)]
fn a_failed_restore_leaves_nothing(
    #[case] kind: VolumeKind,
    #[case] capacity: u64,
    #[case] expected: ErrorKind,
) {
    let leaks = Leaks::watch();
    wait_for_deferred_frees();
    let store = store();
    let (source, image) = block(&store, "source", 4 * MIB);
    // Blocks that were never written are not shared. The store counts a volume without shared blocks without a margin.
    fill(&image, 4 * MIB, 1);
    drop(image);
    store.create_snapshot(&source, &snapshot_id("one")).unwrap();
    let before = store.space().unwrap().available.0;
    let spec = VolumeSpec::new(kind, Bytes(capacity));
    let one = snapshot_id("one");
    let error = store.clone_from(ContentSource::Snapshot(&one), &id("clone"), &spec).unwrap_err();
    assert_eq!(error.kind(), expected, "{error}");
    assert_eq!(store.list().unwrap(), [id("source")]);
    assert!(store.space().unwrap().available.0.abs_diff(before) <= MIB / 2);
    remove(&store, &["source"], &[&one]);
    leaks.check();
}

#[test]
fn concurrent_calls_create_one_snapshot() {
    wait_for_deferred_frees();
    let store = store();
    let (source, image) = block(&store, "source", MIB);
    fill(&image, MIB, 5);
    let before = store.space().unwrap().available.0;
    let one = snapshot_id("one");
    let inodes: Vec<u64> = std::thread::scope(|scope| {
        let call = || inode(&store.create_snapshot(&source, &one).unwrap());
        let workers: Vec<_> = (0..8).map(|_| scope.spawn(call)).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    assert!(inodes.iter().all(|inode| *inode == inodes[0]), "{inodes:?}");
    // Reserved once.
    assert_close(store.space().unwrap().available.0, before - MIB - margin(MIB));
    drop(image);
    remove(&store, &["source"], &[&one]);
}

/// Returns the bytes that the store reserves for a written image with shared blocks beyond its size.
fn margin(size: u64) -> u64 {
    size / 128 + MIB
}

/// The volume has stopped sharing blocks in the meantime.
#[rstest]
#[case::whose_only_snapshot_was_deleted(true)]
#[case::that_was_overwritten(false)]
fn sharing_again_reserves_a_margin(#[case] deleted: bool) {
    const SIZE: u64 = 32 * MIB;
    wait_for_deferred_frees();
    let store = store();
    let (source, image) = block(&store, "source", SIZE);
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
    assert_close(store.space().unwrap().available.0, expected);
    assert_close(available_after_recount(), expected);
    drop(image);
    let all = ids.iter().collect::<Vec<_>>();
    remove(&store, &["source"], if deleted { &all[1..] } else { &all });
}

/// The reservation of the snapshot is the size of the image, and its volume gets the margin.
#[test]
fn a_snapshot_reserves_size_and_margin() {
    const SIZE: u64 = 32 * MIB;
    wait_for_deferred_frees();
    let store = store();
    let available = || store.space().unwrap().available.0;
    let (source, image) = block(&store, "source", SIZE);
    fill(&image, SIZE, 1);
    image.sync_all().unwrap();
    let before = available();
    assert_close(available_after_recount(), before);
    let ids = [snapshot_id("one"), snapshot_id("two")];
    for (taken, id) in ids.iter().enumerate() {
        store.create_snapshot(&source, id).unwrap();
        let expected = before - margin(SIZE) - SIZE * (taken as u64 + 1);
        assert_close(available(), expected);
        assert_close(available_after_recount(), expected);
    }
    // After it was overwritten, the volume shares nothing any more.
    fill(&image, SIZE, 2);
    image.sync_all().unwrap();
    assert_close(available_after_recount(), before - 2 * SIZE);
    restore(&store, &ids[0], "restored", SIZE).unwrap();
    assert_close(available(), before - margin(SIZE) - 3 * SIZE);
    assert_close(available_after_recount(), before - margin(SIZE) - 3 * SIZE);
    // The deleted snapshot stays reserved until the trash is emptied.
    assert!(store.delete_snapshot(&ids[0]).unwrap());
    assert_close(available_after_recount(), before - margin(SIZE) - 3 * SIZE);
    store.empty_trash().unwrap();
    // The volume that was created from one snapshot shares its blocks with the other one.
    assert_close(available(), before - margin(SIZE) - 2 * SIZE);
    assert_close(available_after_recount(), before - margin(SIZE) - 2 * SIZE);
    drop(image);
    remove(&store, &["source", "restored"], &[&ids[1]]);
    assert_close(available(), before + SIZE);
    assert_close(available_after_recount(), before + SIZE);
}

/// The file system has no unreserved space at that time.
#[test]
fn overwriting_the_volume_keeps_the_snapshot() {
    const SIZE: u64 = 24 * MIB;
    let leaks = Leaks::watch();
    let store = store();
    let (source, image) = block(&store, "source", SIZE);
    fill(&image, SIZE, 1);
    image.sync_all().unwrap();
    let one = snapshot_id("one");
    store.create_snapshot(&source, &one).unwrap();
    // All but a block, because its inode takes space as well.
    let rest = crate::environment::store().space().unwrap().available.0 / 4096 * 4096 - 4096;
    drop(block(&store, "rest", rest));
    // Writes in an order in which no two adjacent blocks are written one after the other.
    for start in (0..32).map(|n| n * 13 % 32 * 4096) {
        for offset in (start..SIZE).step_by(32 * 4096) {
            image.write_all_at(&[2; 4096], offset).unwrap();
        }
        image.sync_data().unwrap();
    }
    drop(image);
    remove(&store, &["source", "rest"], &[]);
    assert_filled(&open(&restore(&store, &one, "restored", SIZE).unwrap()), SIZE, 1);
    remove(&store, &["restored"], &[&one]);
    leaks.check();
}

#[test]
fn opening_anything_but_a_snapshot_fails() {
    let store = store();
    let (source, _) = block(&store, "source", MIB);
    store.create_snapshot(&source, &snapshot_id("one")).unwrap();
    std::fs::copy(xfs().join("snapshots/one"), xfs().join("snapshots/foreign")).unwrap();
    std::os::unix::fs::symlink("one", xfs().join("snapshots/link")).unwrap();
    for name in ["foreign", "link"] {
        let error = store.snapshot(&snapshot_id(name)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains(name), "{error}");
        std::fs::remove_file(xfs().join("snapshots").join(name)).unwrap();
    }
    remove(&store, &["source"], &[&snapshot_id("one")]);
}
