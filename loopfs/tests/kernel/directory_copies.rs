//! Tests of volumes and snapshots with the content of a directory. The tests of project trees check which
//! attributes of a file are copied.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use loopfs::project_quota::{ProjectId, project_of};
use loopfs::volume_store::{
    Condition, ContentSource, OwnedContentSource, Recovered, SnapshotId, StoreOptions, Volume, VolumeId,
    VolumeKind, VolumeSpec, VolumeStore,
};
use loopfs::{Bytes, ErrorKind, Inodes};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rstest::rstest;

use crate::environment::{Leaks, default_with, id, quota, store, xfs};

const MIB: u64 = 1 << 20;

fn spec(capacity: u64) -> VolumeSpec {
    VolumeSpec::new(VolumeKind::Filesystem, Bytes(capacity))
}

fn snapshot_id(text: &str) -> SnapshotId {
    SnapshotId::parse(text).unwrap()
}

fn path(volume: &str) -> PathBuf {
    xfs().join("volumes").join(volume)
}

fn count(directory: &str) -> usize {
    std::fs::read_dir(xfs().join(directory)).unwrap().count()
}

/// Opens the store and removes what a failed test may have left.
fn clean_store() -> VolumeStore {
    let store = store();
    for id in store.list().unwrap() {
        store.delete(&id).unwrap();
    }
    for id in store.snapshots().unwrap() {
        store.delete_snapshot(&id).unwrap();
    }
    store.recover().unwrap();
    store.empty_trash().unwrap();
    store
}

fn clone(store: &VolumeStore, source: &str, name: &str, capacity: u64) -> loopfs::Result<Volume> {
    store.clone_from(ContentSource::Volume(&id(source)), &id(name), &spec(capacity))
}

/// Creates a volume with `files` files of 4096 bytes each, in two directories.
fn filled(store: &VolumeStore, name: &str, capacity: u64, files: u64) {
    store.create(&id(name), &spec(capacity)).unwrap();
    for directory in ["a", "b"] {
        std::fs::create_dir(path(name).join(directory)).unwrap();
        for file in 0..files / 2 {
            std::fs::write(path(name).join(directory).join(file.to_string()), [file as u8; 4096]).unwrap();
        }
    }
    // Until delayed allocation is done, the file system reserves more blocks than the files need.
    nix::unistd::sync();
}

#[track_caller]
fn assert_filled(root: PathBuf, files: u64) {
    for directory in ["a", "b"] {
        for file in 0..files / 2 {
            let content = std::fs::read(root.join(directory).join(file.to_string())).unwrap();
            assert!(content == [file as u8; 4096], "{directory}/{file}");
        }
    }
}

fn remove(store: &VolumeStore, volumes: &[&str], snapshots: &[&str]) {
    for name in volumes {
        assert!(store.delete(&id(name)).unwrap(), "{name}");
    }
    for name in snapshots {
        assert!(store.delete_snapshot(&snapshot_id(name)).unwrap(), "{name}");
    }
    assert_eq!(store.empty_trash().unwrap(), volumes.len() + snapshots.len());
    assert_eq!((count("staging"), count("trash")), (0, 0));
}

fn wait_for_background_frees() {
    quota(&File::open(xfs()).unwrap()).finish_inactivation(ProjectId::new(1).unwrap()).unwrap();
}

#[test]
fn a_clone_of_a_directory_has_its_content_and_its_own_limit() {
    let leaks = Leaks::watch();
    let store = clean_store();
    filled(&store, "source", 4 * MIB, 20);
    std::fs::set_permissions(path("source"), std::fs::Permissions::from_mode(0o2750)).unwrap();
    std::fs::hard_link(path("source/a/0"), path("source/a/linked")).unwrap();
    std::os::unix::fs::symlink("a/0", path("source/symlink")).unwrap();
    nix::unistd::mkfifo(&path("source/fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let volume = clone(&store, "source", "clone", 8 * MIB).unwrap();
    assert_eq!((volume.kind(), volume.capacity()), (VolumeKind::Filesystem, Bytes(8 * MIB)));
    assert_eq!(volume.source().unwrap(), Some(OwnedContentSource::Volume(id("source"))));
    drop(volume);
    let stats = store.stats(&id("clone")).unwrap();
    assert_eq!((stats.capacity, stats.condition), (Bytes(8 * MIB), Condition::Healthy));
    let inodes = stats.inodes.unwrap();
    assert_eq!((inodes.total, inodes.used), (Inodes(4096), Inodes(25)));
    assert_eq!(std::fs::read(path("clone/symlink")).unwrap(), [0; 4096]);
    assert_filled(path("clone"), 20);
    assert_eq!(std::fs::metadata(path("clone")).unwrap().permissions().mode() & 0o7777, 0o2750);
    assert_eq!(
        std::fs::metadata(path("clone/a/0")).unwrap().ino(),
        std::fs::metadata(path("clone/a/linked")).unwrap().ino()
    );
    let projects = ["source", "clone"].map(|name| project_of(File::open(path(name)).unwrap()).unwrap());
    assert_ne!(projects[0], projects[1]);

    // The limit applies to the copied content, and changes of one volume do not affect the other.
    let error = std::fs::write(path("clone/a/large"), vec![1; 9 << 20]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    std::fs::remove_file(path("clone/a/large")).unwrap();
    std::fs::write(path("source/a/1"), "changed").unwrap();
    std::fs::remove_dir_all(path("source/b")).unwrap();
    assert_filled(path("clone"), 20);
    store.expand(&id("clone"), Bytes(16 * MIB)).unwrap();
    clone(&store, "clone", "second", 16 * MIB).unwrap();
    remove(&store, &["source", "clone"], &[]);
    assert_filled(path("second"), 20);
    remove(&store, &["second"], &[]);
    leaks.check();
}

#[test]
fn a_full_volume_can_be_cloned_at_the_same_size() {
    let leaks = Leaks::watch();
    let store = clean_store();
    store.create(&id("source"), &spec(4 * MIB)).unwrap();
    // Uses up both the blocks and the inodes.
    let full = (0..).find_map(|file| {
        let name = format!("{file}-{}", "long".repeat(20));
        let content = vec![7; if file < 900 { 4096 } else { 0 }];
        std::fs::write(path("source").join(name), content).err()
    });
    assert_eq!(full.unwrap().raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(clone(&store, "source", "clone", 4 * MIB).unwrap().capacity(), Bytes(4 * MIB));
    let (of_source, of_clone) = (store.stats(&id("source")).unwrap(), store.stats(&id("clone")).unwrap());
    assert_eq!(of_clone.inodes.unwrap().used, of_source.inodes.unwrap().used);
    assert_eq!(of_clone.inodes.unwrap().total, Inodes(2048));
    let names = |volume: &str| std::fs::read_dir(path(volume)).unwrap().count();
    assert_eq!(names("clone"), names("source"));
    remove(&store, &["source", "clone"], &[]);
    leaks.check();
}

#[test]
fn a_snapshot_of_a_directory_keeps_its_content_and_reserves_its_usage() {
    let leaks = Leaks::watch();
    wait_for_background_frees();
    let store = clean_store();
    let available = || store.space().unwrap().available.0;
    filled(&store, "source", 64 * MIB, 400);
    let used = store.stats(&id("source")).unwrap().used.0;
    // This count includes the inodes of the files.
    let before = recount();
    let snapshot = store.create_snapshot(&id("source"), &snapshot_id("one")).unwrap();
    assert_eq!((snapshot.kind(), snapshot.source()), (VolumeKind::Filesystem, &id("source")));
    assert_eq!(snapshot.capacity(), Bytes(64 * MIB), "a snapshot has the capacity of its source");
    assert!(snapshot.used().unwrap().0.abs_diff(used) <= MIB / 8, "{:?}", snapshot.used());
    let remaining = before - snapshot.used().unwrap().0;
    assert_eq!(available(), remaining);
    assert_close(recount(), remaining);
    let project = project_of(File::open(xfs().join("snapshots/one")).unwrap()).unwrap();
    let root = File::open(xfs()).unwrap();
    let usage = quota(&root).usage(ProjectId::new(project).unwrap()).unwrap().unwrap();
    assert_eq!(usage.limits.bytes.hard, Some(usage.bytes), "a snapshot cannot be expanded");
    assert_eq!(usage.limits.inodes.hard, Some(usage.inodes));
    drop(snapshot);

    std::fs::remove_dir_all(path("source/a")).unwrap();
    let inode = || std::fs::metadata(xfs().join("snapshots/one")).unwrap().ino();
    let first = inode();
    assert_eq!(store.recover().unwrap(), Recovered::default());
    remove(&store, &["source"], &[]);
    store.create_snapshot(&id("source"), &snapshot_id("one")).unwrap();
    assert_eq!(inode(), first, "a repeated call returns the same snapshot");

    let one = snapshot_id("one");
    let restore =
        |name: &str, capacity| store.clone_from(ContentSource::Snapshot(&one), &id(name), &spec(capacity));
    let restored = restore("restored", 64 * MIB).unwrap();
    assert_eq!(restored.capacity(), Bytes(64 * MIB));
    assert_eq!(restored.source().unwrap(), Some(OwnedContentSource::Snapshot(one.clone())));
    assert_eq!(restored.bytes_per_inode().unwrap(), Some(VolumeSpec::BYTES_PER_INODE));
    remove(&store, &[], &["one"]);
    assert_filled(path("restored"), 400);
    assert_eq!(restore("restored", 64 * MIB).unwrap().capacity(), Bytes(64 * MIB), "its source was deleted");
    assert_eq!(restore("another", 64 * MIB).unwrap_err().kind(), ErrorKind::NotFound);
    drop(restored);
    remove(&store, &["restored"], &[]);
    leaks.check();
}

#[test]
fn an_empty_directory_can_be_snapshotted() {
    let leaks = Leaks::watch();
    let store = clean_store();
    store.create(&id("source"), &spec(MIB)).unwrap();
    let snapshot = store.create_snapshot(&id("source"), &snapshot_id("one")).unwrap();
    assert_eq!((snapshot.used().unwrap(), snapshot.capacity()), (Bytes(0), Bytes(MIB)));
    drop(snapshot);
    let one = snapshot_id("one");
    store.clone_from(ContentSource::Snapshot(&one), &id("restored"), &spec(MIB)).unwrap();
    remove(&store, &["source", "restored"], &["one"]);
    leaks.check();
}

#[rstest]
#[case::no_such_source("absent", spec(4 * MIB), ErrorKind::NotFound)]
#[case::as_an_image("source", VolumeSpec::new(VolumeKind::Block, Bytes(4 * MIB)), ErrorKind::InvalidInput)]
#[case::smaller_than_the_source("source", spec(2 * MIB), ErrorKind::WouldShrink)]
#[case::of_no_size("source", spec(0), ErrorKind::InvalidInput)]
#[case::fewer_inodes_than_files(
    "source",
    VolumeSpec { bytes_per_inode: std::num::NonZeroU64::new(1 << 20).unwrap(), ..spec(4 * MIB) },
    ErrorKind::WouldShrink
)]
#[case::more_than_there_is("source", spec(1 << 40), ErrorKind::NoSpace)]
fn a_failed_clone_leaves_nothing(
    #[case] source: &str,
    #[case] spec: VolumeSpec,
    #[case] expected: ErrorKind,
) {
    let leaks = Leaks::watch();
    let store = clean_store();
    filled(&store, "source", 4 * MIB, 10);
    let before = store.space().unwrap().available.0;
    let error = store.clone_from(ContentSource::Volume(&id(source)), &id("clone"), &spec).unwrap_err();
    assert_eq!(error.kind(), expected, "{error}");
    assert_eq!((store.list().unwrap(), count("staging"), count("trash")), (vec![id("source")], 0, 0));
    assert_close(store.space().unwrap().available.0, before);
    remove(&store, &["source"], &[]);
    leaks.check();
}

fn recount() -> u64 {
    store().space().unwrap().available.0
}

#[track_caller]
fn assert_close(found: u64, expected: u64) {
    assert!(found.abs_diff(expected) <= MIB / 2, "{found} instead of {expected}");
}

/// The files count in full for each volume but occupy the disk once. The count must still see the space that
/// the file system itself uses.
#[test]
fn shared_files_are_reserved_for_each_volume() {
    wait_for_background_frees();
    let store = clean_store();
    store.create(&id("source"), &spec(100 * MIB)).unwrap();
    std::fs::write(path("source/large"), vec![1; 90 << 20]).unwrap();
    File::open(path("source/large")).unwrap().sync_all().unwrap();
    let before = recount();
    let store = VolumeStore::open(&xfs(), StoreOptions::default()).unwrap_or(store);
    for copies in 1..=3 {
        clone(&store, "source", &format!("clone-{copies}"), 100 * MIB).unwrap();
        assert_close(store.space().unwrap().available.0, before - copies * 100 * MIB);
        assert_close(recount(), before - copies * 100 * MIB);
    }
    // After the rewrite nothing is shared any more, and all the reserved space is available.
    for copy in 1..=3 {
        std::fs::write(path(&format!("clone-{copy}/large")), vec![2; 90 << 20]).unwrap();
    }
    File::open(path("clone-3/large")).unwrap().sync_all().unwrap();
    wait_for_background_frees();
    assert_close(recount(), before - 300 * MIB);
    remove(&store, &["source", "clone-1", "clone-2", "clone-3"], &[]);
    wait_for_background_frees();
    assert_close(recount(), before + 100 * MIB);
}

#[test]
fn concurrent_calls_for_one_clone_create_one_volume() {
    let leaks = Leaks::watch();
    wait_for_background_frees();
    let store = clean_store();
    filled(&store, "source", 4 * MIB, 100);
    let before = store.space().unwrap().available.0;
    let inodes: Vec<u64> = std::thread::scope(|scope| {
        let call = || {
            clone(&store, "source", "clone", 4 * MIB).unwrap();
            std::fs::metadata(path("clone")).unwrap().ino()
        };
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(call)).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    assert!(inodes.iter().all(|inode| *inode == inodes[0]), "{inodes:?}");
    assert_filled(path("clone"), 100);
    store.empty_trash().unwrap();
    assert_eq!((count("staging"), count("trash")), (0, 0));
    assert_close(store.space().unwrap().available.0, before - 4 * MIB);
    remove(&store, &["source", "clone"], &[]);
    leaks.check();
}

/// Set in a child process of this program, which runs one of the tests below as the process to stop or kill.
const CHILD: &str = "LOOPFS_TEST_CHILD";
const DEADLINE: Duration = Duration::from_secs(120);

fn child(test: &str) -> Child {
    let name = format!("directory_copies::{test}");
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    // Another volume takes all the remaining available space.
    command
        .args(["--exact", &name, "--test-threads=1"])
        .env(CHILD, "1")
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

fn as_child() -> loopfs::Result<Volume> {
    let store = VolumeStore::open(&xfs(), StoreOptions::default()).unwrap();
    clone(&store, "source", "clone", 64 * MIB)
}

#[track_caller]
fn eventually(mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < DEADLINE, "not within {DEADLINE:?}");
        std::thread::yield_now();
    }
}

/// A process that was stopped in the middle of copying `source`.
struct StoppedCopy(Child);

impl StoppedCopy {
    /// Enlarges the source until the process can be stopped in the middle of the copy.
    fn in_the_middle_of(test: &str, store: &VolumeStore) -> (Self, u64) {
        for files in [1000, 4000, 16000] {
            filled(store, "source", 64 * MIB, files);
            let process = child(test);
            let staged = || std::fs::read_dir(xfs().join("staging")).unwrap().next();
            let begun = || {
                let inside = staged().and_then(|entry| std::fs::read_dir(entry.ok()?.path()).ok()?.next());
                inside.is_some() || path("clone").exists()
            };
            eventually(begun);
            let mut stopped = Self(process);
            stopped.signal(Signal::SIGSTOP);
            eventually(|| stopped.state() == 'T');
            if !path("clone").exists() && staged().is_some() {
                return (stopped, files);
            }
            stopped.signal(Signal::SIGKILL);
            stopped.0.wait().unwrap();
            store.recover().unwrap();
            store.delete(&id("clone")).unwrap();
            store.delete(&id("source")).unwrap();
            store.empty_trash().unwrap();
        }
        panic!("the copy always completes before the process is stopped");
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    /// Returns the state of the process as in proc_pid_stat(5).
    fn state(&self) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        stat.rsplit(") ").next().unwrap().chars().next().unwrap()
    }

    fn resume(&mut self) -> ExitStatus {
        self.signal(Signal::SIGCONT);
        self.0.wait().unwrap()
    }
}

#[test]
fn recovery_and_other_operations_ignore_a_copy_in_progress() {
    if is_child() {
        as_child().unwrap();
        return;
    }
    let leaks = Leaks::watch();
    let store = clean_store();
    let test = "recovery_and_other_operations_ignore_a_copy_in_progress";
    let (mut stopped, files) = StoppedCopy::in_the_middle_of(test, &store);
    assert_eq!(store.recover().unwrap(), Recovered::default());
    let before = store.space().unwrap().available.0;
    assert_close(recount(), before);
    for kind in [VolumeKind::Filesystem, VolumeKind::Block] {
        store.create(&id("other"), &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
        store.expand(&id("other"), Bytes(2 * MIB)).unwrap();
        assert!(store.delete(&id("other")).unwrap());
        assert_eq!(store.empty_trash().unwrap(), 1);
    }
    assert_eq!(count("staging"), 1);
    assert!(stopped.resume().success());
    assert_filled(path("clone"), files);
    assert_eq!(store.stats(&id("clone")).unwrap().condition, Condition::Healthy);
    assert_eq!(store.recover().unwrap(), Recovered::default());
    remove(&store, &["source", "clone"], &[]);
    leaks.check();
}

#[test]
fn recovery_removes_the_copy_of_a_killed_process() {
    if is_child() {
        as_child().unwrap();
        return;
    }
    let leaks = Leaks::watch();
    wait_for_background_frees();
    let store = clean_store();
    let before = store.space().unwrap().available.0;
    let test = "recovery_removes_the_copy_of_a_killed_process";
    let (mut stopped, _) = StoppedCopy::in_the_middle_of(test, &store);
    stopped.signal(Signal::SIGKILL);
    stopped.0.wait().unwrap();
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.unfinished = 1));
    assert_eq!((store.list().unwrap(), count("staging"), count("trash")), (vec![id("source")], 0, 1));
    assert_eq!(store.recover().unwrap(), Recovered::default(), "a second recovery finds nothing to do");
    assert_eq!(store.empty_trash().unwrap(), 1);
    remove(&store, &["source"], &[]);
    wait_for_background_frees();
    assert_close(store.space().unwrap().available.0, before);
    leaks.check();
}

#[test]
fn deleting_the_source_during_a_copy_creates_no_volume() {
    if is_child() {
        assert_eq!(as_child().unwrap_err().kind(), ErrorKind::NotFound);
        return;
    }
    let leaks = Leaks::watch();
    let store = clean_store();
    let test = "deleting_the_source_during_a_copy_creates_no_volume";
    let (mut stopped, _) = StoppedCopy::in_the_middle_of(test, &store);
    assert!(store.delete(&id("source")).unwrap());
    store.empty_trash().unwrap();
    assert!(stopped.resume().success());
    assert_eq!((store.list().unwrap(), count("staging")), (Vec::<VolumeId>::new(), 0));
    store.empty_trash().unwrap();
    assert_eq!((store.recover().unwrap(), count("trash")), (Recovered::default(), 0));
    leaks.check();
}

#[test]
fn the_reservation_of_a_killed_process_is_released() {
    if is_child() {
        let store = VolumeStore::open(&xfs(), StoreOptions::default()).unwrap();
        store.create(&id("killed"), &spec(64 * MIB)).unwrap();
        return;
    }
    let leaks = Leaks::watch();
    wait_for_background_frees();
    let store = clean_store();
    let available = || store.space().unwrap().available.0;
    let before = available();
    // The process waits for this lock after it reserved the space and before it sets the limit.
    let ids = File::open(xfs().join(".loopfs/project-ids")).unwrap();
    let ids = Flock::lock(ids, FlockArg::LockExclusive).map_err(|(_, errno)| errno).unwrap();
    let mut process = child("the_reservation_of_a_killed_process_is_released");
    eventually(|| count("staging") == 1);
    process.kill().unwrap();
    process.wait().unwrap();
    assert_close(available(), before);
    drop(ids);
    store.create(&id("taken"), &spec(before - 4 * MIB)).unwrap();
    remove_staged(&store);
    remove(&store, &["taken"], &[]);
    leaks.check();
}

/// Removes the directory that the process had not tagged.
fn remove_staged(store: &VolumeStore) {
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.unfinished = 1));
}
