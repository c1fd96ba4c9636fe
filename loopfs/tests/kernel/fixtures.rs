//! What many tests set up, and what must be left at their end.

use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use loopfs::loop_device::{Access, Detach, LoopControl};
use loopfs::volume_store::{SnapshotId, Volume, VolumeId, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, Error, ErrorKind};
use nix::errno::Errno;

use crate::environment::{
    Leaks, MIB, assert_close, available_after_recount, directory, id, image, store, xfs,
};

/// The store of a test. The end of the test deletes all volumes and snapshots, and checks that nothing of them is left.
pub(crate) struct TestStore {
    store: VolumeStore,
    _leaks: Leaks,
}

impl TestStore {
    pub(crate) fn open() -> Self {
        let leaks = Leaks::watch();
        Self { store: store(), _leaks: leaks }
    }
}

impl Deref for TestStore {
    type Target = VolumeStore;

    fn deref(&self) -> &VolumeStore {
        &self.store
    }
}

impl Drop for TestStore {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return delete_all(&self.store);
        }
        // Later tests find an empty store, and the message of this one is not hidden.
        self.store.recover().ok();
        for id in self.store.list().unwrap_or_default() {
            self.store.delete(&id).ok();
        }
        for id in self.store.snapshots().unwrap_or_default() {
            self.store.delete_snapshot(&id).ok();
        }
        self.store.empty_trash().ok();
    }
}

/// Deletes all volumes and snapshots, and checks that nothing else is in the trash or in creation.
pub(crate) fn delete_all(store: &VolumeStore) {
    delete(store, &store.list().unwrap(), &store.snapshots().unwrap());
}

/// Deletes volumes and snapshots, and checks that nothing else is in the trash or in creation.
pub(crate) fn delete(store: &VolumeStore, volumes: &[VolumeId], snapshots: &[SnapshotId]) {
    for id in volumes {
        assert!(store.delete(id).unwrap(), "{id}");
    }
    for id in snapshots {
        assert!(store.delete_snapshot(id).unwrap(), "{id}");
    }
    assert_eq!(store.empty_trash().unwrap(), volumes.len() + snapshots.len());
    assert_eq!((entry_count("staging"), entry_count("trash")), (0, 0));
}

/// Deletes a volume, and checks that nothing else is in the trash or in creation.
pub(crate) fn remove(store: &VolumeStore, id: &VolumeId) {
    assert!(store.delete(id).unwrap());
    store.empty_trash().unwrap();
    assert_eq!((entry_count("staging"), entry_count("trash")), (0, 0));
}

/// Returns the path of a volume in the store.
pub(crate) fn entry(id: &VolumeId) -> PathBuf {
    xfs().join("volumes").join(id.as_str())
}

/// Returns the number of entries in a directory of the store.
pub(crate) fn entry_count(directory: &str) -> usize {
    std::fs::read_dir(xfs().join(directory)).unwrap().count()
}

/// Creates a thick Block volume, and opens its image.
pub(crate) fn create_image(store: &VolumeStore, name: &str, size: u64) -> (VolumeId, File) {
    let id = id(name);
    let volume = store.create(&id, &VolumeSpec::new(VolumeKind::Block, Bytes(size))).unwrap();
    (id, open_image(&volume))
}

pub(crate) fn open_image(volume: &Volume) -> File {
    File::from(volume.open_image(Access::ReadWrite).unwrap())
}

pub(crate) fn allocated(image: &File) -> u64 {
    image.metadata().unwrap().blocks() * 512
}

/// Returns the bytes that the store reserves for an image with shared blocks beyond its size.
pub(crate) fn margin(size: u64) -> u64 {
    size / 128 + MIB
}

/// Has another volume reserve all space that is left.
pub(crate) fn reserve_rest() {
    let store = store();
    // All but a block, because its inode takes space as well.
    let rest = store.space().unwrap().available.0 / 4096 * 4096 - 4096;
    drop(create_image(&store, "rest", rest));
    let more = VolumeSpec::new(VolumeKind::Filesystem, Bytes(4 * MIB));
    assert_eq!(store.create(&id("more"), &more).unwrap_err().kind(), ErrorKind::NoSpace);
}

/// Writes an image in an order in which no two adjacent blocks are written one after the other.
pub(crate) fn write_scattered(image: &File, size: u64, block: impl Fn(u64) -> Vec<u8>) {
    for start in (0..32).map(|n| n * 13 % 32 * 4096) {
        for offset in (start..size).step_by(32 * 4096) {
            image.write_all_at(&block(offset), offset).unwrap();
        }
        image.sync_data().unwrap();
    }
}

/// Loop control, and an image on the quota file system. The end of the test detaches the image, and checks that nothing is left.
pub(crate) struct TestImage {
    pub(crate) control: LoopControl,
    pub(crate) image: File,
    pub(crate) directory: tempfile::TempDir,
    _leaks: Leaks,
}

impl TestImage {
    pub(crate) fn new(size: u64) -> Self {
        let (leaks, directory) = (Leaks::watch(), directory());
        let image = image(directory.path(), "image", size);
        Self { control: LoopControl::open().unwrap(), image, directory, _leaks: leaks }
    }
}

impl Drop for TestImage {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.control.detach_all(&self.image).unwrap(), Detach::Detached);
        }
    }
}

/// Compares the available space, both the kept total and a new count.
#[track_caller]
pub(crate) fn assert_available(store: &VolumeStore, expected: u64) {
    assert_close(store.space().unwrap().available.0, expected);
    assert_close(available_after_recount(), expected);
}

/// Returns the error of a call, and checks its kind.
#[track_caller]
pub(crate) fn assert_fails<T>(result: loopfs::Result<T>, kind: ErrorKind) -> Error {
    let error = result.map(drop).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    error
}

/// Returns the error of a call, and checks its kind and errno.
#[track_caller]
pub(crate) fn assert_refused<T>(result: loopfs::Result<T>, kind: ErrorKind, errno: Option<Errno>) -> Error {
    let error = assert_fails(result, kind);
    assert_eq!(error.errno(), errno.map(|errno| errno as i32), "{error}");
    error
}

/// Makes a call concurrently in each of `threads` threads.
pub(crate) fn concurrently<T: Send>(threads: usize, call: impl Fn() -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..threads).map(|_| scope.spawn(&call)).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}
