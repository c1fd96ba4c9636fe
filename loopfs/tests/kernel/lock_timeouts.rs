//! Tests of store locks that another process holds and does not release.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use loopfs::volume_store::{StoreOptions, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, ErrorKind};

use crate::environment::{Leaks, MIB, id, store, xfs};
use crate::fixtures::{TestStore, assert_fails, entry, remove};

#[test]
fn a_lock_timeout_names_the_file() {
    let _leaks = Leaks::watch();
    drop(store());
    let options = StoreOptions { lock_timeout: Duration::from_millis(20), ..StoreOptions::default() };
    let open = || VolumeStore::open(&xfs(), options.clone());
    // Any user can lock this directory.
    let root = File::open(xfs()).unwrap();
    root.lock().unwrap();
    let store = open().unwrap();
    drop(root);
    let (image, directory) = (id("image"), id("directory"));
    store.create(&image, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    let spec = VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB));
    let create = || store.create(&directory, &spec).map(drop);
    let calls: [(PathBuf, &dyn Fn() -> loopfs::Result<()>); 8] = [
        (xfs().join("staging"), &|| open().map(drop)),
        (xfs().join(".loopfs/lock"), &create),
        (xfs().join(".loopfs/lock"), &|| store.delete(&image).map(drop)),
        (xfs().join(".loopfs/lock"), &|| store.recover().map(drop)),
        (xfs().join(".loopfs/promised"), &create),
        (xfs().join(".loopfs/project-ids"), &create),
        (xfs().join(".loopfs/users"), &|| store.delete(&image).map(drop)),
        (entry(&image), &|| store.expand(&image, Bytes(2 * MIB)).map(drop)),
    ];
    for (path, call) in calls {
        let other = File::open(&path).unwrap();
        other.lock().unwrap();
        let error = assert_fails(call(), ErrorKind::Busy);
        for part in [path.to_str().unwrap(), "lslocks", "20ms"] {
            assert!(error.to_string().contains(part), "{part} is missing in: {error}");
        }
    }
    // The refused calls left nothing behind. Once the locks are free, all of them succeed.
    assert_eq!(store.volume(&directory).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(store.expand(&image, Bytes(2 * MIB)).unwrap().capacity(), Bytes(2 * MIB));
    create().unwrap();
    remove(&store, &directory);
    remove(&store, &image);
}

#[test]
fn constant_expansions_do_not_stop_recovery() {
    const THREADS: usize = 8;
    let (store, id, stop) = (TestStore::open(), id("busy"), AtomicBool::new(false));
    store.create(&id, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    let options = StoreOptions { lock_timeout: Duration::from_secs(10), ..StoreOptions::default() };
    let other = VolumeStore::open(&xfs(), options).unwrap();
    let recovered: Vec<_> = std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    store.expand(&id, Bytes(MIB)).unwrap();
                }
            });
        }
        let recovered = (0..5).map(|_| other.recover()).collect();
        stop.store(true, Ordering::Relaxed);
        recovered
    });
    for recovered in recovered {
        recovered.unwrap();
    }
}
