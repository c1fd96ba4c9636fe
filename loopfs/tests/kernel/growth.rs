//! Tests of expansion by several processes.

use std::sync::Barrier;

use loopfs::Bytes;
use loopfs::volume_store::{StoreOptions, VolumeKind, VolumeSpec, VolumeStore};
use rstest::rstest;

use crate::environment::{Leaks, id, store, xfs};
use crate::store::{MIB, remove};

#[rstest]
#[case::filesystem(VolumeKind::Filesystem)]
#[case::block(VolumeKind::Block)]
fn a_large_enough_volume_stays_unchanged(#[case] kind: VolumeKind) {
    let leaks = Leaks::watch();
    let (store, id) = (store(), id("grown"));
    store.create(&id, &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
    for least in [0, 1, MIB] {
        assert_eq!(store.expand(&id, Bytes(least)).unwrap().capacity(), Bytes(MIB));
    }
    remove(&store, &id);
    leaks.check();
}

#[rstest]
#[case::filesystem(VolumeKind::Filesystem)]
#[case::block(VolumeKind::Block)]
fn concurrent_expansions_reach_the_largest_size(#[case] kind: VolumeKind) {
    const PROCESSES: u64 = 4;
    const STEP: u64 = 64 << 10;
    let leaks = Leaks::watch();
    let (store, id) = (store(), id("grown"));
    store.create(&id, &VolumeSpec::new(kind, Bytes(STEP))).unwrap();
    for round in 0..40 {
        let together = Barrier::new(PROCESSES as usize);
        std::thread::scope(|scope| {
            for process in 0..PROCESSES {
                let (id, together) = (&id, &together);
                scope.spawn(move || {
                    // Each process opens the store for itself. They share only the file system.
                    let store = VolumeStore::open(&xfs(), StoreOptions::default()).unwrap();
                    let capacity = Bytes((2 + round * PROCESSES + process) * STEP);
                    together.wait();
                    assert!(store.expand(id, capacity).unwrap().capacity() >= capacity);
                });
            }
        });
        let largest = Bytes((1 + (round + 1) * PROCESSES) * STEP);
        assert_eq!(store.volume(&id).unwrap().capacity(), largest, "round {round}");
        assert_eq!(store.space().unwrap().reserved, largest, "round {round}");
    }
    remove(&store, &id);
    leaks.check();
}
