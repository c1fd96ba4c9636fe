//! Tests of expansion: the caller that expands an image learns when the devices have its new size.

use std::os::fd::AsFd;
use std::sync::Barrier;
use std::time::Duration;

use loopfs::volume_store::{StoreOptions, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, ErrorKind};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rstest::rstest;

use crate::environment::{Leaks, id, store, xfs};
use crate::store::{MIB, remove};

/// A timeout that expires only if something is wrong.
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn a_watcher_sees_the_expansion_and_the_waiter_returns_once_the_size_is_recorded() {
    let leaks = Leaks::watch();
    let (store, id) = (store(), id("image"));
    let volume = store.create(&id, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    assert_eq!(volume.device_size().unwrap(), Some(Bytes(MIB)), "it has no device with a smaller size");
    for within in [Duration::ZERO, Duration::MAX] {
        assert!(store.wait_for_device_size(&id, Bytes(MIB), within).unwrap());
    }
    for least in [0, 1] {
        let unchanged = store.expand(&id, Bytes(least)).unwrap();
        assert_eq!(unchanged.capacity(), Bytes(MIB), "it is large enough already");
    }

    let watch = store.watch().unwrap();
    let grown = store.expand(&id, Bytes(2 * MIB)).unwrap();
    assert!(
        !store.wait_for_device_size(&id, Bytes(2 * MIB), Duration::from_millis(1)).unwrap(),
        "the size was not recorded yet"
    );
    poll(&mut [PollFd::new(watch.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
    let changes = watch.read().unwrap();
    assert_eq!(changes.volumes.iter().collect::<Vec<_>>(), [&id]);
    assert!(!changes.overflowed && !changes.ended);

    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| store.wait_for_device_size(&id, Bytes(2 * MIB), TIMEOUT).unwrap());
        // The waiting thread must see this record, whether it already waits or not.
        grown.record_device_size(Bytes(2 * MIB)).unwrap();
        assert!(waiting.join().unwrap());
    });
    watch.read().unwrap();
    grown.record_device_size(Bytes(2 * MIB)).unwrap();
    assert!(watch.read().unwrap().volumes.is_empty(), "a recorded size is not written again");

    drop((watch, volume, grown));
    remove(&store, &id);
    leaks.check();
}

#[test]
fn a_directory_has_no_devices_to_wait_for() {
    let leaks = Leaks::watch();
    let (store, id) = (store(), id("directory"));
    let volume = store.create(&id, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    assert_eq!(volume.device_size().unwrap(), None);
    assert_eq!(volume.record_device_size(Bytes(MIB)).unwrap_err().kind(), ErrorKind::InvalidInput);
    drop(volume);
    remove(&store, &id);
    leaks.check();
}

#[rstest]
#[case::filesystem(VolumeKind::Filesystem)]
#[case::block(VolumeKind::Block)]
fn concurrent_expansions_end_at_the_largest_size_and_reserve_no_more(#[case] kind: VolumeKind) {
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
