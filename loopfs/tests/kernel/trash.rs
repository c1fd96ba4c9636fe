//! Emptying the trash beside other processes.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use loopfs::{Bytes, StoreOptions, VolumeKind, VolumeSpec, VolumeStore};

use crate::environment::{Leaks, id, store, xfs};
use crate::store::{MIB, remove};

/// Set in a child process.
const CHILD: &str = "LOOPFS_TEST_CHILD";
const SIZE: Bytes = Bytes(4 * MIB);

fn open() -> VolumeStore {
    VolumeStore::open(&xfs(), StoreOptions::default()).unwrap()
}

fn reserved() -> Bytes {
    open().space().unwrap().promised
}

/// A volume whose directory is removed while the returned descriptor keeps its project id draining.
fn draining(store: &VolumeStore, name: &str) -> OwnedFd {
    store.create(&id(name), &VolumeSpec::new(VolumeKind::Filesystem, SIZE)).unwrap();
    let held = store.volume(&id(name)).unwrap().open_dir().unwrap();
    assert!(store.delete(&id(name)).unwrap());
    assert_eq!(store.empty_trash().unwrap(), 1);
    held
}

#[test]
fn a_draining_id_s_space_is_released_once_when_another_process_frees_the_id() {
    if std::env::var_os(CHILD).is_some() {
        let other = open();
        // The other process learns of the draining id from the file system.
        println!("draining {}", other.recover().unwrap().busy_ids);
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        other.empty_trash().unwrap();
        return;
    }
    let leaks = Leaks::watch();
    let store = store();
    store.create(&id("kept"), &VolumeSpec::new(VolumeKind::Filesystem, SIZE)).unwrap();
    let held = draining(&store, "held");
    assert_eq!(reserved(), Bytes(2 * SIZE.0));

    let thread = std::thread::current();
    let test = thread.name().expect("the thread has the name of its test");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, "yes")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut lines = output.by_ref().lines().map(Result::unwrap);
    assert!(lines.any(|line| line.ends_with("draining 1")));
    assert_eq!(reserved(), Bytes(2 * SIZE.0));
    drop(held);
    drop(child.stdin.take());
    output.read_to_end(&mut Vec::new()).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(reserved(), SIZE, "the other process has released it");

    store.empty_trash().unwrap();
    assert_eq!(reserved(), SIZE, "the space of a volume that exists was released");
    remove(&store, &id("kept"));
    leaks.check();
}

#[test]
fn a_draining_id_s_space_is_released_once_when_recovery_in_another_process_frees_the_id() {
    let leaks = Leaks::watch();
    let store = store();
    store.create(&id("kept"), &VolumeSpec::new(VolumeKind::Filesystem, SIZE)).unwrap();
    drop(draining(&store, "held"));
    assert_eq!(open().recover().unwrap().released_ids, 1);
    assert_eq!(reserved(), SIZE);
    store.empty_trash().unwrap();
    assert_eq!(reserved(), SIZE, "the space of a volume that exists was released");
    remove(&store, &id("kept"));
    leaks.check();
}
