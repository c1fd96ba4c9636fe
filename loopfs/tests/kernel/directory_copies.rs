//! Tests of copies of Filesystem volumes: clones, snapshots, and volumes created from a snapshot. The tests of project trees
//! check which attributes of a file are copied.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};

use loopfs::project_quota::{ProjectId, project_of};
use loopfs::volume_store::{
    Condition, ContentSource, OwnedContentSource, Recovered, StoreOptions, Volume, VolumeId, VolumeKind,
    VolumeSpec, VolumeStore,
};
use loopfs::{Bytes, ErrorKind, Inodes};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::environment::{
    MIB, assert_close, available_after_recount, default_with, directory_with, id, quota, snapshot_id,
    this_test_again, wait_for_deferred_frees, wait_until, with_few_inodes, xfs,
};
use crate::fixtures::{TestStore, assert_available, assert_fails, delete, entry_count};

/// The volumes have many small files.
fn spec(capacity: u64) -> VolumeSpec {
    directory_with(Bytes(capacity), 2048)
}

fn volume_path(volume: &str) -> PathBuf {
    xfs().join("volumes").join(volume)
}

fn clone(store: &VolumeStore, source: &str, name: &str, capacity: u64) -> loopfs::Result<Volume> {
    store.clone_from(ContentSource::Volume(&id(source)), &id(name), &spec(capacity))
}

/// Creates a volume with `files` files of 4096 bytes each, half of them in the directory `a` and half in `b`.
fn create_with_files(store: &VolumeStore, name: &str, capacity: u64, files: u64) {
    store.create(&id(name), &spec(capacity)).unwrap();
    for directory in ["a", "b"] {
        std::fs::create_dir(volume_path(name).join(directory)).unwrap();
        for file in 0..files / 2 {
            std::fs::write(volume_path(name).join(directory).join(file.to_string()), [file as u8; 4096])
                .unwrap();
        }
    }
    // Until delayed allocation is done, the file system reserves more blocks than the files need.
    nix::unistd::sync();
}

#[track_caller]
fn assert_has_files(root: PathBuf, files: u64) {
    for directory in ["a", "b"] {
        for file in 0..files / 2 {
            let content = std::fs::read(root.join(directory).join(file.to_string())).unwrap();
            assert!(content == [file as u8; 4096], "{directory}/{file}");
        }
    }
}

#[test]
fn an_unwanted_copy_ends() {
    let store = TestStore::open();
    // The copy asks at every 1024th name.
    create_with_files(&store, "source", 32 * MIB, 2100);
    let source = id("source");
    for is_snapshot in [false, true] {
        let mut asked = 0;
        let is_wanted = || {
            asked += 1;
            asked < 2
        };
        let copied = match is_snapshot {
            true => store.create_snapshot_while(&source, &snapshot_id("s"), is_wanted).map(drop),
            false => {
                let from = ContentSource::Volume(&source);
                store.clone_from_while(from, &id("clone"), &spec(32 * MIB), is_wanted).map(drop)
            }
        };
        let error = copied.unwrap_err();
        assert_eq!((error.kind(), asked), (ErrorKind::Other, 2), "{error}");
        assert_eq!(store.list().unwrap(), std::slice::from_ref(&source));
        assert_eq!(store.snapshots().unwrap(), []);
        store.empty_trash().unwrap();
        assert_eq!((entry_count("staging"), entry_count("trash")), (0, 0));
    }
    clone(&store, "source", "clone", 32 * MIB).unwrap();
    assert_has_files(volume_path("clone"), 2100);
}

#[test]
fn a_clone_has_content_and_limit() {
    let store = TestStore::open();
    create_with_files(&store, "source", 4 * MIB, 20);
    std::fs::set_permissions(volume_path("source"), std::fs::Permissions::from_mode(0o2750)).unwrap();
    std::fs::hard_link(volume_path("source/a/0"), volume_path("source/a/linked")).unwrap();
    std::os::unix::fs::symlink("a/0", volume_path("source/symlink")).unwrap();
    nix::unistd::mkfifo(&volume_path("source/fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::fs::write(volume_path("source/most"), vec![1; 3 << 20]).unwrap();
    let volume = clone(&store, "source", "clone", 8 * MIB).unwrap();
    assert_eq!((volume.kind(), volume.capacity()), (VolumeKind::Filesystem, Bytes(8 * MIB)));
    assert_eq!(volume.source().unwrap(), Some(OwnedContentSource::Volume(id("source"))));
    drop(volume);
    let stats = store.stats(&id("clone")).unwrap();
    assert_eq!((stats.capacity, stats.condition), (Bytes(8 * MIB), Condition::Healthy));
    let inodes = stats.inodes.unwrap();
    // One inode per 2048 bytes. Used are 21 for files and one each for the volume, `a`, `b`, the symbolic link and the FIFO.
    assert_eq!((inodes.total, inodes.used), (Inodes(4096), Inodes(26)));
    assert_eq!(std::fs::read(volume_path("clone/symlink")).unwrap(), [0; 4096], "the link leads to a/0");
    assert_has_files(volume_path("clone"), 20);
    assert_eq!(std::fs::metadata(volume_path("clone")).unwrap().permissions().mode() & 0o7777, 0o2750);
    let inode = |name| std::fs::metadata(volume_path(name)).unwrap().ino();
    assert_eq!(inode("clone/a/0"), inode("clone/a/linked"));
    let projects =
        ["source", "clone"].map(|name| project_of(File::open(volume_path(name)).unwrap()).unwrap());
    assert_ne!(projects[0], projects[1]);

    // The copied content counts towards the limit of the clone, and changes of one volume do not affect the other.
    let error = std::fs::write(volume_path("clone/a/large"), vec![1; 6 << 20]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    std::fs::write(volume_path("source/a/1"), vec![1; 1 << 19]).unwrap();
    std::fs::remove_file(volume_path("clone/a/large")).unwrap();
    std::fs::remove_dir_all(volume_path("source/b")).unwrap();
    assert_has_files(volume_path("clone"), 20);
    store.expand(&id("clone"), Bytes(16 * MIB)).unwrap();
    clone(&store, "clone", "second", 16 * MIB).unwrap();
    delete(&store, &[id("source"), id("clone")], &[]);
    assert_has_files(volume_path("second"), 20);
}

#[test]
fn a_full_volume_can_be_cloned() {
    let store = TestStore::open();
    store.create(&id("source"), &spec(MIB)).unwrap();
    // Most of the 256 blocks become content. The directory entries of empty files use the others, and then the inodes.
    let error = (0..).find_map(|file| {
        let name = format!("{file}-{}", "long".repeat(20));
        let content = vec![7; if file < 225 { 4096 } else { 0 }];
        std::fs::write(volume_path("source").join(name), content).err()
    });
    assert_eq!(error.unwrap().raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(clone(&store, "source", "clone", MIB).unwrap().capacity(), Bytes(MIB));
    let stats = |name: &str| store.stats(&id(name)).unwrap().inodes.unwrap();
    assert_eq!(stats("clone").used, stats("source").used);
    assert_eq!(stats("clone").total, Inodes(512));
    let entries = |volume: &str| std::fs::read_dir(volume_path(volume)).unwrap().count();
    assert_eq!(entries("clone"), entries("source"));
}

/// The snapshot keeps its content after the files of the volume were deleted.
#[test]
fn a_snapshot_reserves_its_usage() {
    let store = TestStore::open();
    create_with_files(&store, "source", 64 * MIB, 400);
    let used = store.stats(&id("source")).unwrap().used.0;
    // A recount, because the inodes of the new files are overhead that the running total does not know.
    let before = available_after_recount();
    let snapshot = store.create_snapshot(&id("source"), &snapshot_id("one")).unwrap();
    assert_eq!((snapshot.kind(), snapshot.source()), (VolumeKind::Filesystem, &id("source")));
    assert_eq!(snapshot.capacity(), Bytes(64 * MIB), "a snapshot has the capacity of its source");
    assert!(snapshot.used().unwrap().0.abs_diff(used) <= MIB / 8, "{:?}", snapshot.used());
    // 403 inodes of 512 bytes, in each of four groups.
    let remaining = before - snapshot.used().unwrap().0 - 403 * 4 * 512;
    assert_available(&store, remaining);
    let project = project_of(File::open(xfs().join("snapshots/one")).unwrap()).unwrap();
    let root = File::open(xfs()).unwrap();
    let usage = quota(&root).usage(ProjectId::new(project).unwrap()).unwrap().unwrap();
    assert_eq!(usage.limits.bytes, Some(usage.bytes), "the limit of a snapshot is its usage");
    assert_eq!(usage.limits.inodes, Some(usage.inodes));
    drop(snapshot);

    std::fs::remove_dir_all(volume_path("source/a")).unwrap();
    let inode = || std::fs::metadata(xfs().join("snapshots/one")).unwrap().ino();
    let inode_before = inode();
    assert_eq!(store.recover().unwrap(), Recovered::default());
    delete(&store, &[id("source")], &[]);
    store.create_snapshot(&id("source"), &snapshot_id("one")).unwrap();
    assert_eq!(inode(), inode_before, "a repeated call returns the same snapshot");

    let one = snapshot_id("one");
    let restore =
        |name: &str, capacity| store.clone_from(ContentSource::Snapshot(&one), &id(name), &spec(capacity));
    let restored = restore("restored", 64 * MIB).unwrap();
    assert_eq!(restored.capacity(), Bytes(64 * MIB));
    assert_eq!(restored.source().unwrap(), Some(OwnedContentSource::Snapshot(one.clone())));
    assert_eq!(restored.settings_differ(&spec(0)).unwrap(), None);
    delete(&store, &[], &[snapshot_id("one")]);
    assert_has_files(volume_path("restored"), 400);
    // A repeated call needs no source.
    assert_eq!(restore("restored", 64 * MIB).unwrap().capacity(), Bytes(64 * MIB));
    assert_eq!(restore("another", 64 * MIB).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn an_empty_directory_can_be_snapshotted() {
    let store = TestStore::open();
    store.create(&id("source"), &spec(MIB)).unwrap();
    let snapshot = store.create_snapshot(&id("source"), &snapshot_id("one")).unwrap();
    assert_eq!((snapshot.used().unwrap(), snapshot.capacity()), (Bytes(0), Bytes(MIB)));
    drop(snapshot);
    let one = snapshot_id("one");
    store.clone_from(ContentSource::Snapshot(&one), &id("restored"), &spec(MIB)).unwrap();
}

#[test]
fn a_failed_clone_leaves_nothing_behind() {
    let store = TestStore::open();
    create_with_files(&store, "source", 4 * MIB, 10);
    let before = store.space().unwrap().available.0;
    for (source, spec, expected) in [
        ("absent", spec(4 * MIB), ErrorKind::NotFound),
        ("source", VolumeSpec::new(VolumeKind::Block, Bytes(4 * MIB)), ErrorKind::InvalidInput),
        ("source", spec(2 * MIB), ErrorKind::WouldShrink),
        ("source", spec(0), ErrorKind::InvalidInput),
        // Fewer inodes than the source.
        ("source", directory_with(Bytes(4 * MIB), 1 << 20), ErrorKind::WouldShrink),
        ("source", spec(1 << 40), ErrorKind::NoSpace),
    ] {
        let clone = store.clone_from(ContentSource::Volume(&id(source)), &id("clone"), &spec);
        assert_fails(clone, expected);
        assert_eq!(
            (store.list().unwrap(), entry_count("staging"), entry_count("trash")),
            (vec![id("source")], 0, 0)
        );
        assert_close(store.space().unwrap().available.0, before);
    }
}

/// The quota usage of each volume includes its shared files in full, although they occupy the disk once. A recount derives
/// the overhead of the file system from that usage, and must not underestimate it for this reason.
#[test]
fn shared_files_are_reserved_per_volume() {
    let store = TestStore::open();
    let spec = with_few_inodes(Bytes(16 * MIB));
    store.create(&id("source"), &spec).unwrap();
    std::fs::write(volume_path("source/large"), vec![1; 14 << 20]).unwrap();
    File::open(volume_path("source/large")).unwrap().sync_all().unwrap();
    let before = available_after_recount();
    for copies in 1..=3 {
        let clone = id(&format!("clone-{copies}"));
        store.clone_from(ContentSource::Volume(&id("source")), &clone, &spec).unwrap();
        assert_available(&store, before - copies * 16 * MIB);
    }
    // Overwriting the shared files needs the reserved space, and leaves nothing shared.
    for copy in 1..=3 {
        std::fs::write(volume_path(&format!("clone-{copy}/large")), vec![2; 14 << 20]).unwrap();
    }
    File::open(volume_path("clone-3/large")).unwrap().sync_all().unwrap();
    wait_for_deferred_frees();
    assert_close(available_after_recount(), before - 48 * MIB);
    delete(&store, &[id("source"), id("clone-1"), id("clone-2"), id("clone-3")], &[]);
    wait_for_deferred_frees();
    assert_close(available_after_recount(), before + 16 * MIB);
}

/// Set in a child process that runs the calling test again, as the process to stop or kill.
const CHILD: &str = "LOOPFS_TEST_CHILD";

fn start_child() -> Child {
    this_test_again(CHILD, "1").stdout(Stdio::null()).spawn().unwrap()
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// The work of the child processes of most tests.
fn clone_in_child() -> loopfs::Result<Volume> {
    let store = VolumeStore::open(&xfs(), StoreOptions::default()).unwrap();
    clone(&store, "source", "clone", 64 * MIB)
}

/// A child process that was stopped while it copies `source` to `clone`.
struct StoppedCopy(Child);

impl StoppedCopy {
    /// Creates `source`, starts a process that clones it, and stops the process. If the copy is complete by then, repeats this
    /// with a larger source. Returns the number of files in the source as well.
    fn start(store: &VolumeStore) -> (Self, u64) {
        for files in [250, 1000, 4000, 16000] {
            create_with_files(store, "source", 64 * MIB, files);
            let process = start_child();
            let staged = || std::fs::read_dir(xfs().join("staging")).unwrap().next();
            let begun = || {
                let inside = staged().and_then(|entry| std::fs::read_dir(entry.ok()?.path()).ok()?.next());
                inside.is_some() || volume_path("clone").exists()
            };
            wait_until(begun);
            let mut stopped = Self(process);
            stopped.signal(Signal::SIGSTOP);
            // It may have ended.
            wait_until(|| matches!(stopped.state(), 'T' | 'Z'));
            if !volume_path("clone").exists() && staged().is_some() {
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
        // The state follows the name of the program, which is in parentheses and may contain some itself.
        stat.rsplit(") ").next().unwrap().chars().next().unwrap()
    }

    fn resume(&mut self) -> ExitStatus {
        self.signal(Signal::SIGCONT);
        self.0.wait().unwrap()
    }
}

#[test]
fn other_operations_ignore_unfinished_copies() {
    if is_child() {
        clone_in_child().unwrap();
        return;
    }
    let store = TestStore::open();
    let (mut stopped, files) = StoppedCopy::start(&store);
    assert_eq!(store.recover().unwrap(), Recovered::default());
    let before = store.space().unwrap().available.0;
    assert_close(available_after_recount(), before);
    for kind in [VolumeKind::Filesystem, VolumeKind::Block] {
        store.create(&id("other"), &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
        store.expand(&id("other"), Bytes(2 * MIB)).unwrap();
        assert!(store.delete(&id("other")).unwrap());
        assert_eq!(store.empty_trash().unwrap(), 1);
    }
    assert_eq!(entry_count("staging"), 1);
    assert!(stopped.resume().success());
    assert_has_files(volume_path("clone"), files);
    assert_eq!(store.stats(&id("clone")).unwrap().condition, Condition::Healthy);
    assert_eq!(store.recover().unwrap(), Recovered::default());
}

#[test]
fn recovery_removes_a_killed_copy() {
    if is_child() {
        clone_in_child().unwrap();
        return;
    }
    let store = TestStore::open();
    let before = store.space().unwrap().available.0;
    let (mut stopped, _) = StoppedCopy::start(&store);
    stopped.signal(Signal::SIGKILL);
    stopped.0.wait().unwrap();
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.unfinished = 1));
    assert_eq!(
        (store.list().unwrap(), entry_count("staging"), entry_count("trash")),
        (vec![id("source")], 0, 1)
    );
    assert_eq!(store.recover().unwrap(), Recovered::default(), "a second recovery finds nothing to do");
    assert_eq!(store.empty_trash().unwrap(), 1);
    delete(&store, &[id("source")], &[]);
    wait_for_deferred_frees();
    assert_close(store.space().unwrap().available.0, before);
}

#[test]
fn deleting_the_source_fails_the_copy() {
    if is_child() {
        assert_eq!(clone_in_child().unwrap_err().kind(), ErrorKind::NotFound);
        return;
    }
    let store = TestStore::open();
    let (mut stopped, _) = StoppedCopy::start(&store);
    assert!(store.delete(&id("source")).unwrap());
    store.empty_trash().unwrap();
    assert!(stopped.resume().success());
    assert_eq!((store.list().unwrap(), entry_count("staging")), (Vec::<VolumeId>::new(), 0));
    store.empty_trash().unwrap();
    assert_eq!((store.recover().unwrap(), entry_count("trash")), (Recovered::default(), 0));
}

#[test]
fn reservation_of_killed_process_is_released() {
    if is_child() {
        let store = VolumeStore::open(&xfs(), StoreOptions::default()).unwrap();
        store.create(&id("killed"), &spec(64 * MIB)).unwrap();
        return;
    }
    let store = TestStore::open();
    let available = || store.space().unwrap().available.0;
    let before = available();
    // The process waits for this lock after it reserved the space and before it sets the limit.
    let ids = File::open(xfs().join(".loopfs/project-ids")).unwrap();
    let ids = Flock::lock(ids, FlockArg::LockExclusive).map_err(|(_, errno)| errno).unwrap();
    let mut process = start_child();
    wait_until(|| entry_count("staging") == 1);
    process.kill().unwrap();
    process.wait().unwrap();
    assert_close(available(), before);
    drop(ids);
    // Another volume can have all the space that is available again.
    store.create(&id("taken"), &with_few_inodes(Bytes(before - 4 * MIB))).unwrap();
    // The killed process left a directory in `staging`, which has no project id yet.
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.unfinished = 1));
}
