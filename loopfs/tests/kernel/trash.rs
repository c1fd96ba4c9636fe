//! Tests of emptying the trash: concurrently with other processes, with entries that cannot be removed, and
//! with entries that are still open.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Barrier;

use loopfs::loop_device::{Access, AttachOptions, Detach, LoopControl};
use loopfs::mount::{MountFlags, bind_mount};
use loopfs::volume_store::{Provisioning, StoreOptions, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, ErrorKind};
use nix::mount::{MntFlags, MsFlags, mount, umount, umount2};
use rstest::rstest;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use crate::environment::{Leaks, MIB, id, scratch, store, this_test_again, xfs};
use crate::fixtures::{TestStore, assert_fails, entry};

/// Set in a child process of a test.
const CHILD: &str = "LOOPFS_TEST_CHILD";
const SIZE: Bytes = Bytes(4 * MIB);

fn open() -> VolumeStore {
    VolumeStore::open(&xfs(), StoreOptions::default()).unwrap()
}

fn trash() -> Vec<PathBuf> {
    std::fs::read_dir(xfs().join("trash")).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn reserved() -> Bytes {
    open().space().unwrap().reserved
}

/// Creates a volume and removes its directory. The returned descriptor keeps its project id draining, as a process in a lazily
/// detached mount does, which no mount table lists.
fn draining(store: &VolumeStore, name: &str) -> File {
    let (volume, target) =
        (store.create(&id(name), &VolumeSpec::new(VolumeKind::Filesystem, SIZE)).unwrap(), scratch());
    bind_mount(volume.open_dir().unwrap(), target.path(), MountFlags::default()).unwrap();
    let held = File::open(target.path()).unwrap();
    umount2(target.path(), MntFlags::MNT_DETACH).unwrap();
    assert!(store.delete(&id(name)).unwrap());
    assert_eq!(store.empty_trash().unwrap(), 1);
    held
}

/// Another process frees the draining id, and the process that emptied the trash must not release the space again.
#[test]
fn space_freed_elsewhere_is_released_once() {
    if std::env::var_os(CHILD).is_some() {
        let other = open();
        // The other process finds the draining id on the file system.
        println!("draining {}", other.recover().unwrap().busy_ids);
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        other.empty_trash().unwrap();
        return;
    }
    let store = TestStore::open();
    store.create(&id("kept"), &VolumeSpec::new(VolumeKind::Filesystem, SIZE)).unwrap();
    let held = draining(&store, "held");
    assert_eq!(reserved(), Bytes(2 * SIZE.0));

    let mut child = this_test_again(CHILD, "yes").stdin(Stdio::piped()).spawn().unwrap();
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
}

/// The process that emptied the trash has ended since, and the id is in no other list.
#[test]
fn a_later_process_frees_draining_ids() {
    let _leaks = Leaks::watch();
    let held = draining(&store(), "held");
    assert_eq!(trash().len(), 1, "the trash records the id");
    let later = open();
    assert_eq!(later.empty_trash().unwrap(), 0);
    assert_eq!((reserved(), trash().len()), (SIZE, 1));
    drop(held);
    assert_eq!(open().empty_trash().unwrap(), 0);
    assert_eq!((reserved(), trash().len()), (Bytes(0), 0));
}

/// The error mentions the trash only if a deleted volume is in it.
#[test]
fn a_nospace_error_mentions_the_trash() {
    let store = TestStore::open();
    let spec = VolumeSpec::new(VolumeKind::Filesystem, Bytes(store.space().unwrap().available.0 / 4 * 3));
    store.create(&id("first"), &spec).unwrap();
    let second = || store.create(&id("second"), &spec).map(drop);
    let error = second().unwrap_err();
    assert!(error.kind() == ErrorKind::NoSpace && !error.to_string().contains("trash"), "{error}");
    assert!(store.delete(&id("first")).unwrap());
    let error = second().unwrap_err();
    assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("empty the trash"), "{error}");
    store.empty_trash().unwrap();
    second().unwrap();
}

/// The process that removes the directory cannot free its project id, because another process that empties the trash has it open,
/// and does not try again.
#[test]
fn last_opener_frees_the_project_id() {
    let (store, other, volume) = (TestStore::open(), open(), id("both"));
    store.create(&volume, &VolumeSpec::new(VolumeKind::Filesystem, SIZE)).unwrap();
    File::create(entry(&volume).join("file")).unwrap();
    assert!(store.delete(&volume).unwrap());

    let (mut turns, mut removed_by_other) = (0, 0);
    let removed = store.empty_trash_yielding(|| {
        turns += 1;
        // In the second turn the directory is open: the file in it is about to be removed.
        if turns == 2 {
            removed_by_other = other.empty_trash().unwrap();
            assert_eq!(reserved(), SIZE, "the directory is not open");
        }
    });
    assert_eq!((removed_by_other, removed.unwrap()), (1, 0));
    assert_eq!(reserved(), Bytes(0));
    // The other process still lists the id, which has a new volume by now.
    store.create(&volume, &VolumeSpec::new(VolumeKind::Filesystem, SIZE)).unwrap();
    assert_eq!(other.empty_trash().unwrap(), 0);
    assert_eq!(reserved(), SIZE, "the space of a volume that exists was released");
}

/// Creates nested directories with a file in each.
fn deep_tree(root: &Path, depth: usize) {
    let mut directory = root.to_owned();
    for _ in 0..depth {
        directory.push("deeper");
        std::fs::create_dir(&directory).unwrap();
        File::create(directory.join("file")).unwrap();
    }
}

fn set_immutable(path: &Path, immutable: bool) {
    let file = File::open(path).unwrap();
    let mut flags = ioctl_getflags(&file).unwrap();
    flags.set(IFlags::IMMUTABLE, immutable);
    ioctl_setflags(&file, flags).unwrap();
}

#[derive(Clone, Copy)]
enum Obstacle {
    ImmutableFile,
    Mount,
}

/// One call removes everything except each obstacle and the directories that contain it.
#[rstest]
#[case::an_immutable_file(Obstacle::ImmutableFile)]
#[case::a_mount(Obstacle::Mount)]
fn only_obstacles_stay_after_one_call(#[case] obstacle: Obstacle) {
    let store = TestStore::open();
    let names = ["first", "second", "third"];
    for name in names {
        store.create(&id(name), &VolumeSpec::new(VolumeKind::Filesystem, SIZE)).unwrap();
        deep_tree(&entry(&id(name)), 12);
        // Every entry has an obstacle, so the order of removal does not matter.
        let directory = entry(&id(name)).join("obstacle");
        std::fs::create_dir_all(directory.join("stuck")).unwrap();
        deep_tree(&directory, 12);
        for n in 0..20 {
            File::create(directory.join(n.to_string())).unwrap();
        }
        match obstacle {
            Obstacle::ImmutableFile => {
                File::create(directory.join("stuck/file")).unwrap();
                set_immutable(&directory.join("stuck/file"), true);
            }
            Obstacle::Mount => {
                let target = directory.join("stuck");
                mount(Some("none"), &target, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
            }
        }
        assert!(store.delete(&id(name)).unwrap());
    }
    store.create(&id("other"), &VolumeSpec::new(VolumeKind::Filesystem, SIZE)).unwrap();
    deep_tree(&entry(&id("other")), 12);
    assert!(store.delete(&id("other")).unwrap());

    let error = store.empty_trash().unwrap_err();
    assert!(error.to_string().contains("stuck") || error.to_string().contains("file"), "{error}");
    let left: Vec<_> = trash().iter().flat_map(|entry| walk(entry)).collect();
    // Three volumes remain, each with its obstacle and the directories that contain it.
    assert_eq!(left.len(), 3 * 3, "{left:?}");
    assert!(!left.iter().any(|path| path.to_string_lossy().contains("/other.")), "{left:?}");
    // The store reserves what remains of a deleted volume, not its size.
    assert!(reserved() <= Bytes(3 << 16), "{}", reserved());

    for _ in names {
        match obstacle {
            Obstacle::ImmutableFile => {
                let file = left.iter().find(|path| path.ends_with("file") && path.exists()).unwrap();
                set_immutable(file, false);
                std::fs::remove_file(file).unwrap();
            }
            Obstacle::Mount => {
                let stuck = left.iter().find(|path| umount(path.as_path()).is_ok());
                stuck.unwrap_or_else(|| panic!("no mount in {left:?}"));
            }
        }
    }
    assert_eq!(store.empty_trash().unwrap(), 3);
    assert_eq!(trash(), Vec::<PathBuf>::new());
}

fn walk(path: &Path) -> Vec<PathBuf> {
    let mut found = vec![path.to_owned()];
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            found.extend(walk(&entry.unwrap().path()));
        }
    }
    found
}

#[test]
fn concurrent_emptying_counts_volumes_once() {
    const EACH: usize = 6;
    const PROCESSES: usize = 3;
    let store = TestStore::open();
    for round in 0..3 {
        let name = |n: usize| id(&format!("v-{round}-{n}"));
        for n in 0..EACH {
            let kind = if n % 3 == 0 { VolumeKind::Block } else { VolumeKind::Filesystem };
            store.create(&name(n), &VolumeSpec::new(kind, SIZE)).unwrap();
            if kind == VolumeKind::Filesystem {
                deep_tree(&entry(&name(n)), 10);
            }
            assert!(store.delete(&name(n)).unwrap());
        }
        // Each process opens the store for itself. They share only the file system.
        let stores: Vec<_> = (0..PROCESSES).map(|_| open()).collect();
        let together = Barrier::new(PROCESSES);
        let mut removed: usize = std::thread::scope(|scope| {
            let empty = |store| {
                let together = &together;
                scope.spawn(move || {
                    together.wait();
                    VolumeStore::empty_trash(store)
                })
            };
            let running: Vec<_> = stores.iter().map(empty).collect();
            running.into_iter().map(|process| process.join().unwrap().unwrap()).sum()
        });
        // The next call of each store removes what two processes had open concurrently. Linux 7.3 can keep a directory that was
        // removed by one of them in its cache, and charge it to the project until memory is short.
        std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
        removed += stores.iter().map(|store| store.empty_trash().unwrap()).sum::<usize>();
        assert_eq!(removed, EACH);
        assert_eq!(trash(), Vec::<PathBuf>::new());
        assert_eq!(reserved(), Bytes(0), "round {round}");
    }
}

#[rstest]
#[case::a_deferred_detach(true, false)]
#[case::a_file_open_for_reading(false, false)]
#[case::a_file_open_for_writing(false, true)]
fn an_open_image_keeps_its_reservation(#[case] device: bool, #[case] writing: bool) {
    let (store, id) = (TestStore::open(), id("held"));
    let before = store.space().unwrap().available.0;
    let most = Bytes(before / 4 * 3);
    let mut thin = VolumeSpec::new(VolumeKind::Block, most);
    thin.image.provisioning = Provisioning::Thin;
    let volume = store.create(&id, &thin).unwrap();
    let holder = if device {
        let control = LoopControl::open().unwrap();
        let image = volume.open_image(Access::ReadWrite).unwrap();
        let device = control.attach(&image, &AttachOptions::new(Access::ReadWrite)).unwrap();
        let user = File::open(device.path()).unwrap();
        assert!(matches!(control.detach(device).unwrap(), Detach::Deferred(_)));
        user
    } else {
        // As the loop device of another program holds one.
        File::options().read(true).write(writing).open(entry(&id)).unwrap()
    };
    drop(volume);
    let reservation = reserved();
    assert!(store.delete(&id).unwrap());
    assert_eq!(store.empty_trash().unwrap(), 0, "the blocks of the image are in use");
    assert_eq!(reserved(), reservation);
    let directory = VolumeSpec::new(VolumeKind::Filesystem, most);
    assert_fails(store.create(&crate::environment::id("second"), &directory), ErrorKind::NoSpace);

    drop(holder);
    assert_eq!(store.empty_trash().unwrap(), 1);
    assert_eq!(reserved(), Bytes(0));
    store.create(&crate::environment::id("second"), &directory).unwrap();
}

/// A process that died after freeing the blocks leaves the entry. The next process removes it.
/// The store releases the full reservation.
#[test]
fn a_truncated_image_is_removed_completely() {
    let (store, id) = (TestStore::open(), id("image"));
    store.create(&crate::environment::id("kept"), &VolumeSpec::new(VolumeKind::Block, SIZE)).unwrap();
    store.create(&id, &VolumeSpec::new(VolumeKind::Block, SIZE)).unwrap();
    assert!(store.delete(&id).unwrap());
    File::options().write(true).open(&trash()[0]).unwrap().set_len(0).unwrap();
    assert_eq!(reserved(), Bytes(2 * SIZE.0));
    let recounted = crate::environment::store().space().unwrap().reserved;
    assert_eq!(recounted, Bytes(2 * SIZE.0), "a recount includes the truncated image");
    assert_eq!(store.empty_trash().unwrap(), 1);
    assert_eq!(reserved(), SIZE);
}
