use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};

use loopfs::loop_device::{Access, AttachOptions, BlockSize, Detach, DirectIo, LoopControl};
use loopfs::volume_store::{ContentSource, OwnedContentSource, Volume, VolumeKind, VolumeSpec};
use loopfs::{Bytes, ErrorKind};
use rstest::rstest;

use crate::environment::{
    MIB, assert_close, available_after_recount, clone_image, id, linux_at_least, snapshot_id, store,
};
use crate::fixtures::{
    TestStore, allocated, assert_available, assert_fails, create_image, margin, open_image, remove,
    reserve_rest, write_scattered,
};

/// Writes pages whose content depends on their offset and the seed, so that each page is unique in the image.
fn fill(image: &File, from: u64, to: u64, seed: u8) {
    image.write_all_at(&pages(from, to, seed), from).unwrap();
}

fn pages(from: u64, to: u64, seed: u8) -> Vec<u8> {
    let pages: Vec<_> = (from..to).step_by(4096).map(|offset| page(offset, seed)).collect();
    pages.concat()
}

fn page(offset: u64, seed: u8) -> Vec<u8> {
    [offset.to_le_bytes(), [seed; 8]].concat().repeat(256)
}

#[track_caller]
fn assert_filled(image: &File, from: u64, to: u64, seed: u8) {
    let mut found = vec![0; (to - from) as usize];
    image.read_exact_at(&mut found, from).unwrap();
    for (offset, found) in (from..to).step_by(4096).zip(found.chunks(4096)) {
        assert!(found == page(offset, seed), "at {offset}: {:?}", &found[..16]);
    }
}

#[test]
fn a_clone_is_an_independent_volume() {
    let store = TestStore::open();
    let (source, original) = create_image(&store, "source", 5 * MIB);
    // The data is only in the page cache. The clone must contain it all the same.
    fill(&original, 0, 4 * MIB, 1);
    let volume = clone_image(&store, &source, &id("clone"), Bytes(6 * MIB)).unwrap();
    assert_eq!((volume.kind(), volume.capacity()), (VolumeKind::Block, Bytes(6 * MIB)));
    assert_eq!(volume.source().unwrap(), Some(OwnedContentSource::Volume(source.clone())));
    assert_eq!(store.volume(&source).unwrap().source().unwrap(), None);
    assert_eq!(store.stats(&id("clone")).unwrap().capacity, Bytes(6 * MIB));
    let clone = open_image(&volume);
    assert_ne!(clone.metadata().unwrap().ino(), original.metadata().unwrap().ino());
    assert_filled(&clone, 0, 4 * MIB, 1);
    // The last megabyte of the source was never written.
    let mut rest = vec![1; 2 * MIB as usize];
    clone.read_exact_at(&mut rest, 4 * MIB).unwrap();
    assert!(rest.iter().all(|byte| *byte == 0), "no earlier tenant's data");
    assert_eq!(allocated(&clone), 6 * MIB, "preallocated, and no blocks past the end");

    fill(&clone, 0, MIB, 2);
    fill(&original, MIB, 2 * MIB, 3);
    assert_filled(&original, 0, MIB, 1);
    assert_filled(&clone, MIB, 2 * MIB, 1);
    // A clone can be expanded and cloned, and it outlives its source, as any other volume does.
    store.expand(&id("clone"), Bytes(8 * MIB)).unwrap();
    let second = open_image(&clone_image(&store, &id("clone"), &id("second"), Bytes(8 * MIB)).unwrap());
    drop(original);
    remove(&store, &source);
    assert_filled(&second, 0, MIB, 2);
    assert_filled(&clone, MIB, 4 * MIB, 1);
}

/// The call returns the clone even after the source was deleted.
#[test]
fn repeating_a_clone_returns_it() {
    let store = TestStore::open();
    let (source, _) = create_image(&store, "source", MIB);
    let (other, _) = create_image(&store, "other", MIB);
    let inode = |volume: Volume| open_image(&volume).metadata().unwrap().ino();
    let first = inode(clone_image(&store, &source, &id("clone"), Bytes(MIB)).unwrap());
    assert_eq!(inode(clone_image(&store, &source, &id("clone"), Bytes(MIB)).unwrap()), first);
    store.expand(&id("clone"), Bytes(2 * MIB)).unwrap();
    assert_eq!(inode(clone_image(&store, &source, &id("clone"), Bytes(MIB)).unwrap()), first);

    let conflicts = [
        clone_image(&store, &other, &id("clone"), Bytes(MIB)).unwrap_err(),
        clone_image(&store, &source, &id("clone"), Bytes(4 * MIB)).unwrap_err(),
        clone_image(&store, &source, &other, Bytes(MIB)).unwrap_err(),
        store.create(&id("clone"), &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap_err(),
        store.create(&id("clone"), &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap_err(),
    ];
    for error in conflicts {
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        assert!(error.to_string().contains("a clone of volume source"), "{error}");
    }
    remove(&store, &source);
    assert_eq!(inode(clone_image(&store, &source, &id("clone"), Bytes(MIB)).unwrap()), first);
}

#[rstest]
fn a_failed_copy_leaves_nothing(#[values(false, true)] from_snapshot: bool) {
    let store = TestStore::open();
    let (_, image) = create_image(&store, "source", 4 * MIB);
    // Blocks that were never written are not shared. The store counts a volume without shared blocks without a margin.
    fill(&image, 0, 4 * MIB, 1);
    store.create(&id("directory"), &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    if from_snapshot {
        for name in ["source", "directory"] {
            store.create_snapshot(&id(name), &snapshot_id(name)).unwrap();
        }
    }
    let before = store.space().unwrap().available;
    for (source, kind, capacity, expected) in [
        ("absent", VolumeKind::Block, 4 * MIB, ErrorKind::NotFound),
        ("directory", VolumeKind::Block, 4 * MIB, ErrorKind::InvalidInput),
        ("source", VolumeKind::Filesystem, 4 * MIB, ErrorKind::InvalidInput),
        ("source", VolumeKind::Block, 2 * MIB, ErrorKind::WouldShrink),
        ("source", VolumeKind::Block, 0, ErrorKind::InvalidInput),
        ("source", VolumeKind::Block, u64::MAX, ErrorKind::InvalidInput),
        ("source", VolumeKind::Block, 1 << 40, ErrorKind::NoSpace),
    ] {
        let (volume, snapshot) = (id(source), snapshot_id(source));
        let content =
            if from_snapshot { ContentSource::Snapshot(&snapshot) } else { ContentSource::Volume(&volume) };
        let spec = VolumeSpec::new(kind, Bytes(capacity));
        assert_fails(store.clone_from(content, &id("clone"), &spec), expected);
        assert_eq!(store.volume(&id("clone")).unwrap_err().kind(), ErrorKind::NotFound);
        // A call that is refused for want of space makes the store recount.
        assert_close(store.space().unwrap().available.0, before.0);
    }
}

/// Up to Linux 6.14 a device on a file with shared blocks can have both direct I/O and 512-byte blocks. Later
/// kernels know that such a file accepts direct writes only in whole blocks. They grant only one of the two
/// to a device that is attached after the file was cloned. A device that was attached before the clone keeps
/// both.
#[test]
fn cloning_keeps_an_attached_device_unchanged() {
    let store = TestStore::open();
    let control = LoopControl::open().unwrap();
    let (source, original) = create_image(&store, "source", 4 * MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    let device = control.ensure_attached(&original, &options).unwrap();
    let mut through = File::options().write(true).open(device.path()).unwrap();
    through.write_all(&page(0, 7)).unwrap();
    through.sync_all().unwrap();

    let volume = clone_image(&store, &source, &id("clone"), Bytes(4 * MIB)).unwrap();
    let clone = open_image(&volume);
    assert_filled(&clone, 0, 4096, 7);
    assert!(control.find(&clone).unwrap().is_empty(), "the clone has the index lock of its source");
    let status = device.status().unwrap();
    assert_eq!((status.direct_io, status.block_size), (true, 512));
    through.write_all(&[9; 512]).unwrap();
    through.sync_all().unwrap();
    let mut written = [0; 512];
    original.read_exact_at(&mut written, 4096).unwrap();
    assert_eq!(written, [9; 512], "writes of one sector still succeed");
    clone.read_exact_at(&mut written, 4096).unwrap();
    assert_eq!(written, [0; 512], "and do not reach the clone");

    drop((through, device));
    assert_eq!(control.detach_all(&original).unwrap(), Detach::Detached);
    let whole_blocks_only = linux_at_least(6, 15);
    for image in [&original, &clone] {
        match control.ensure_attached(image, &options) {
            Ok(device) => {
                assert!(!whole_blocks_only);
                let status = device.status().unwrap();
                assert_eq!((status.direct_io, status.block_size), (true, 512));
            }
            Err(error) => {
                assert!(whole_blocks_only, "{error}");
                assert_eq!(error.kind(), ErrorKind::NotHonoured, "{error}");
                assert!(error.to_string().contains("4096"), "no remedy in: {error}");
            }
        }
        assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);
    }
}

/// The tests of settings have the block sizes that a volume can have.
#[test]
fn a_clone_is_attached_with_fitting_blocks() {
    let store = TestStore::open();
    let control = LoopControl::open().unwrap();
    let (source, original) = create_image(&store, "source", MIB);
    fill(&original, 0, MIB, 1);
    let clone = open_image(&clone_image(&store, &source, &id("clone"), Bytes(MIB)).unwrap());
    let block_size = if linux_at_least(6, 15) { 4096 } else { 512 };
    for requested in [BlockSize::MatchDirectIo, BlockSize::KernelDefault] {
        let options =
            AttachOptions::new(Access::ReadWrite).direct_io(DirectIo::Required).block_size(requested);
        let device = control.attach(&clone, &options).unwrap();
        let status = device.status().unwrap();
        assert_eq!((status.block_size, status.direct_io), (block_size, true), "{requested:?}");
        // However the device writes, it must not change the source.
        let through = File::options().write(true).open(device.path()).unwrap();
        through.write_all_at(&vec![8; block_size as usize], u64::from(block_size)).unwrap();
        through.sync_all().unwrap();
        let mut written = vec![0; block_size as usize];
        clone.read_exact_at(&mut written, u64::from(block_size)).unwrap();
        assert!(written.iter().all(|byte| *byte == 8));
        assert_filled(&original, 0, MIB, 1);
        drop((through, device));
        assert_eq!(control.detach_all(&clone).unwrap(), Detach::Detached);
    }
}

/// Each volume still reserves its full size, so that all shared blocks can be overwritten.
#[test]
fn shared_blocks_are_counted_once() {
    const SIZE: u64 = 8 * MIB;
    let store = store();
    let (source, original) = create_image(&store, "source", SIZE);
    fill(&original, 0, SIZE, 1);
    original.sync_all().unwrap();
    let (before, recounted) = (store.space().unwrap().available.0, available_after_recount());
    assert_eq!(recounted, before);
    let with_margins = |images| SIZE + images * margin(SIZE);
    clone_image(&store, &source, &id("clone-1"), Bytes(SIZE)).unwrap();
    assert_available(&store, before - with_margins(2));
    clone_image(&store, &source, &id("clone-2"), Bytes(SIZE)).unwrap();
    assert_available(&store, before - SIZE - with_margins(3));
    // The written blocks now belong to the clone alone. The reservation does not change.
    let clone = open_image(&store.volume(&id("clone-1")).unwrap());
    // Writing every second block creates more extents than one FIEMAP call returns.
    for offset in (0..5 * MIB).step_by(8192) {
        clone.write_all_at(&page(offset, 2), offset).unwrap();
    }
    clone.sync_all().unwrap();
    assert_close(available_after_recount(), before - SIZE - with_margins(3));
    // The deleted source still shares its blocks. The blocks and the reservation stay until the trash is
    // emptied.
    assert!(store.delete(&source).unwrap());
    drop(original);
    assert_close(available_after_recount(), before - SIZE - with_margins(3));
    store.empty_trash().unwrap();
    assert_available(&store, before - with_margins(2));
    drop(clone);
    remove(&store, &id("clone-1"));
    assert_available(&store, before);
    remove(&store, &id("clone-2"));
    assert_close(available_after_recount(), before + SIZE);
}

/// Another volume has reserved all other space.
#[test]
fn a_clone_can_always_be_overwritten() {
    const SIZE: u64 = 8 * MIB;
    let store = TestStore::open();
    let (source, original) = create_image(&store, "source", SIZE);
    fill(&original, 0, SIZE, 1);
    original.sync_all().unwrap();
    let clone = open_image(&clone_image(&store, &source, &id("clone"), Bytes(SIZE)).unwrap());
    reserve_rest();
    for seed in [2, 3] {
        write_scattered(&clone, SIZE, |offset| page(offset, seed));
    }
    fill(&original, 0, SIZE, 4);
    original.sync_all().unwrap();
    assert_filled(&clone, 0, SIZE, 3);
}
