//! Tests of the reported free capacity: it is exact again after every operation, whatever operation was in
//! progress during a count.

use std::fs::File;
use std::io::{BufRead, BufReader};

use loopfs::Bytes;
use loopfs::volume_store::{
    AbnormalReason, Condition, Provisioning, StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore,
};
use nix::fcntl::{FallocateFlags, fallocate};

use crate::environment::{Leaks, MIB, directory, id, store, this_test_again, wait_for_deferred_frees, xfs};
use crate::fixtures::{TestStore, delete_all};
use crate::trash::CHILD;

/// The tolerance for what the file system uses for directories, inodes and quotas.
const TOLERANCE: u64 = MIB;

/// Compares the kept total with a fresh count.
#[track_caller]
fn assert_exact(kept: &VolumeStore) {
    wait_for_deferred_frees();
    let available = kept.space().unwrap().available;
    // This store counts the volumes, as the first process after a reboot does.
    let counted = store().space().unwrap().available;
    assert!(available.0.abs_diff(counted.0) < TOLERANCE, "{available} kept, {counted} counted");
}

/// The file of another program takes what is reserved.
#[test]
fn taken_space_is_reported() {
    let (store, mounted, thin, directory) = (TestStore::open(), id("mounted"), id("thin"), directory());
    store.create(&mounted, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(8 * MIB))).unwrap();
    let mut spec = VolumeSpec::new(VolumeKind::Block, Bytes(8 * MIB));
    spec.image.provisioning = Provisioning::Thin;
    store.create(&thin, &spec).unwrap();
    let is_taken = |id: &VolumeId| {
        let stats = store.stats(id).unwrap();
        match stats.condition {
            Condition::Healthy => {
                assert!(stats.available > Bytes(7 * MIB), "{stats:?}");
                false
            }
            Condition::Abnormal { reason: AbnormalReason::SpaceTaken, .. } => {
                assert!(stats.available <= Bytes(4 * MIB), "{stats:?}");
                true
            }
            Condition::Abnormal { .. } => panic!("{stats:?}"),
        }
    };
    let free = nix::sys::statvfs::statvfs(&xfs()).unwrap();
    let free = free.blocks_available() * free.fragment_size();
    let foreign = File::create(directory.path().join("foreign")).unwrap();
    let mut end = 0;
    for (left, taken) in [(16 * MIB, false), (4 * MIB, true)] {
        let next = i64::try_from(free - left).unwrap();
        fallocate(&foreign, FallocateFlags::empty(), end, next - end).unwrap();
        end = next;
        assert_eq!([&mounted, &thin].map(is_taken), [taken; 2], "{left} bytes are left");
    }
    drop(foreign);
    directory.close().unwrap();
    wait_for_deferred_frees();
    assert_eq!([&mounted, &thin].map(is_taken), [false; 2]);
}

#[test]
fn a_count_excludes_blocks_being_freed() {
    const PIECES: i64 = 2000;
    let _leaks = Leaks::watch();
    let directory = directory();
    wait_for_deferred_frees();
    let before = store().space().unwrap().available;
    for _ in 0..5 {
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        // The image has many extents, so that freeing it takes some time.
        for piece in 0..PIECES {
            fallocate(&file, FallocateFlags::empty(), piece * 16384, 8192).unwrap();
        }
        drop(file);
        std::fs::remove_file(path).unwrap();
        let available = store().space().unwrap().available;
        assert!(available.0.abs_diff(before.0) < TOLERANCE, "{available} counted, {before} free before");
    }
}

#[test]
fn the_space_is_exact_after_kills() {
    let size = Bytes(4 * MIB);
    if std::env::var_os(CHILD).is_some() {
        let store = VolumeStore::open(&xfs(), StoreOptions::default()).unwrap();
        loop {
            for kind in [VolumeKind::Filesystem, VolumeKind::Block] {
                let id = id(&kind.to_string());
                store.create(&id, &VolumeSpec::new(kind, size)).unwrap();
                store.expand(&id, Bytes(2 * size.0)).unwrap();
                println!("once more");
                assert!(store.delete(&id).unwrap());
                store.empty_trash().unwrap();
            }
        }
    }
    let _leaks = Leaks::watch();
    for rounds in 1..=12 {
        let kept = store();
        kept.space().unwrap();
        let mut child = this_test_again(CHILD, "yes").spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert_eq!(lines.filter(|line| line.contains("once more")).take(rounds).count(), rounds);
        // The kill can hit any step, because the child performs all steps between this line and the next.
        child.kill().unwrap();
        child.wait().unwrap();
        assert_exact(&kept);
        kept.recover().unwrap();
        assert_exact(&kept);
        // What the killed process had deleted.
        kept.empty_trash().unwrap();
        delete_all(&kept);
        assert_exact(&kept);
    }
}
