use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use loopfs::loop_device::Access;
use loopfs::mount::{MountFlags, bind_mount, unmount};
use loopfs::project_quota::{Enforcement, Limits, ProjectId, project_of};
use loopfs::volume_store::{
    AbnormalReason, Condition, Provisioning, StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore,
};
use loopfs::{Bytes, ErrorKind, Inodes, test_support};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use rstest::rstest;

use crate::environment::{
    Leaks, MIB, assert_close, available_after_recount, clone_image, directory_with, id, project, quota,
    scratch, snapshot_id, store, wait_for_deferred_frees, with_few_inodes, xfs, xfs_without_quota,
};
use crate::fixtures::{
    TestStore, assert_available, assert_fails, assert_refused, concurrently, create_image, entry,
    entry_count, margin, remove,
};

#[test]
fn a_filesystem_volume_expands_in_use() {
    let (store, id) = (TestStore::open(), id("fs-1"));
    let spec = VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB));
    let volume = store.create(&id, &spec).unwrap();
    assert_eq!((volume.kind(), volume.capacity()), (VolumeKind::Filesystem, Bytes(MIB)));

    let target = scratch();
    bind_mount(volume.open_dir().unwrap(), target.path(), MountFlags::default()).unwrap();
    let size = || {
        let status = nix::sys::statvfs::statvfs(target.path()).unwrap();
        (status.blocks() * status.fragment_size(), status.files())
    };
    assert_eq!(size(), (MIB, 64));
    assert_eq!(std::fs::metadata(target.path()).unwrap().permissions().mode() & 0o7777, 0o777);
    let mut file = File::create(target.path().join("data")).unwrap();
    file.write_all(&[1; 4096]).unwrap();
    file.sync_all().unwrap();

    assert_eq!(store.expand(&id, Bytes(4 * MIB)).unwrap().capacity(), Bytes(4 * MIB));
    assert_eq!(size(), (4 * MIB, 256));
    for least in [0, 1, MIB, 4 * MIB] {
        assert_eq!(store.expand(&id, Bytes(least)).unwrap().capacity(), Bytes(4 * MIB), "{least}");
    }

    let stats = store.stats(&id).unwrap();
    assert_eq!((stats.capacity, stats.used), (Bytes(4 * MIB), Bytes(4096)));
    assert_eq!(stats.available, Bytes(4 * MIB - 4096));
    assert_eq!(stats.inodes.unwrap().used, Inodes(2));
    assert_eq!(stats.condition, Condition::Healthy);

    drop((file, volume));
    assert!(unmount(target.path()).unwrap());
}

/// An expansion also preallocates the additional blocks.
#[test]
fn block_volumes_are_preallocated_with_zeroes() {
    let (store, id) = (TestStore::open(), id("block-1"));
    let volume = store.create(&id, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    let image = File::from(volume.open_image(Access::ReadWrite).unwrap());
    let metadata = image.metadata().unwrap();
    assert_eq!((metadata.len(), metadata.blocks() * 512), (MIB, MIB));
    let mut content = vec![1; MIB as usize];
    image.read_exact_at(&mut content, 0).unwrap();
    assert!(content.iter().all(|byte| *byte == 0), "no earlier tenant's data");
    image.write_all_at(b"kept", 4096).unwrap();

    assert_eq!(store.expand(&id, Bytes(4 * MIB)).unwrap().capacity(), Bytes(4 * MIB));
    let metadata = image.metadata().unwrap();
    assert_eq!((metadata.len(), metadata.blocks() * 512), (4 * MIB, 4 * MIB));
    let mut kept = [0; 4];
    image.read_exact_at(&mut kept, 4096).unwrap();
    assert_eq!(&kept, b"kept");
    for least in [0, 1, MIB, 4 * MIB] {
        assert_eq!(store.expand(&id, Bytes(least)).unwrap().capacity(), Bytes(4 * MIB), "{least}");
    }
    assert_eq!(store.stats(&id).unwrap().capacity, Bytes(4 * MIB));
}

/// If the request differs from the volume, the error names the properties that differ.
#[rstest]
fn repeating_a_creation_returns_the_volume(
    #[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind,
) {
    let (store, id) = (TestStore::open(), id("twice"));
    let spec = VolumeSpec::new(kind, Bytes(MIB));
    store.create(&id, &spec).unwrap();
    let inode = std::fs::symlink_metadata(entry(&id)).unwrap().ino();
    store.create(&id, &spec).unwrap();
    assert_eq!(std::fs::symlink_metadata(entry(&id)).unwrap().ino(), inode);

    let other = if kind == VolumeKind::Block { VolumeKind::Filesystem } else { VolumeKind::Block };
    for conflict in [VolumeSpec::new(other, Bytes(MIB)), VolumeSpec::new(kind, Bytes(2 * MIB))] {
        assert_fails(store.create(&id, &conflict), ErrorKind::AlreadyExists);
    }
    assert_eq!(store.list().unwrap(), std::slice::from_ref(&id));
    remove(&store, &id);
    assert!(!store.delete(&id).unwrap(), "deleting again succeeds and deletes nothing");
    assert_eq!(store.volume(&id).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn any_entry_counts_as_data() {
    let (store, id) = (TestStore::open(), id("fs-1"));
    let volume = store.create(&id, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    assert!(!volume.holds_data().unwrap());
    File::create(entry(&id).join(".hidden")).unwrap();
    assert!(volume.holds_data().unwrap());
    assert!(store.volume(&id).unwrap().holds_data().unwrap());
    std::fs::remove_file(entry(&id).join(".hidden")).unwrap();
    assert!(!volume.holds_data().unwrap());
}

/// The write is in the page cache at first, above a preallocated block.
#[rstest]
#[case::preallocated(Provisioning::Thick)]
#[case::sparse(Provisioning::Thin)]
fn a_written_image_holds_data(#[case] provisioning: Provisioning) {
    let (store, id) = (TestStore::open(), id("block-1"));
    let mut spec = VolumeSpec::new(VolumeKind::Block, Bytes(4 * MIB));
    spec.image.provisioning = provisioning;
    store.create(&id, &spec).unwrap();
    store.expand(&id, Bytes(8 * MIB)).unwrap();
    let volume = store.volume(&id).unwrap();
    assert!(!volume.holds_data().unwrap(), "preallocated blocks are no data");
    let image = File::from(volume.open_image(Access::ReadWrite).unwrap());
    image.write_all_at(b"data", 7 * MIB).unwrap();
    assert!(volume.holds_data().unwrap());
    image.sync_all().unwrap();
    assert!(volume.holds_data().unwrap());
}

#[rstest]
fn an_oversized_request_leaves_nothing(
    #[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind,
) {
    let store = TestStore::open();
    let space = store.space().unwrap();
    let requested = Bytes(space.total.0 * 2);
    let created = store.create(&id("huge"), &VolumeSpec::new(kind, requested));
    let error = assert_fails(created, ErrorKind::NoSpace);
    for figure in [requested.to_string(), space.available.to_string()] {
        assert!(error.to_string().contains(&figure), "{figure} is missing in: {error}");
    }
    assert!(store.list().unwrap().is_empty());
    assert_eq!((entry_count("staging"), entry_count("trash")), (0, 0));

    store.create(&id("small"), &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
    assert_fails(store.expand(&id("small"), requested), ErrorKind::NoSpace);
    assert_eq!(store.volume(&id("small")).unwrap().capacity(), Bytes(MIB));
    let metadata = std::fs::symlink_metadata(entry(&id("small"))).unwrap();
    assert!(metadata.blocks() * 512 <= MIB, "blocks were left past the end of the image");
}

/// Another program has put the image into a project with a limit.
#[test]
fn a_failed_expansion_changes_nothing() {
    let (store, id) = (TestStore::open(), id("block-1"));
    let volume = store.create(&id, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    let image = File::from(volume.open_image(Access::ReadWrite).unwrap());
    image.write_all_at(b"kept", 4096).unwrap();
    image.sync_all().unwrap();
    let project = project(4903);
    let root = File::open(xfs()).unwrap();
    quota(&root).set_limits(project, Limits::hard(Bytes(2 * MIB), Inodes(1))).unwrap();
    test_support::set_project_of_file(&image, project.get()).unwrap();
    let before = store.space().unwrap().available;
    // The error comes from the kernel and not from the store's count.
    assert_refused(store.expand(&id, Bytes(before.0 / 2)), ErrorKind::NoSpace, Some(Errno::ENOSPC));
    let metadata = image.metadata().unwrap();
    assert_eq!((metadata.len(), metadata.blocks() * 512), (MIB, MIB));
    let mut kept = [0; 4];
    image.read_exact_at(&mut kept, 4096).unwrap();
    assert_eq!(&kept, b"kept");
    assert_eq!(store.space().unwrap().available, before);
    // The failed call leaves the file system intact.
    quota(&root).clear_limits(project).unwrap();
    store.expand(&id, Bytes(before.0 / 2)).unwrap();
}

#[rstest]
fn trash_stays_reserved_until_emptied(#[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind) {
    let (store, id) = (TestStore::open(), id("deleted"));
    let before = store.space().unwrap().available.0;
    let most = VolumeSpec { kind, ..with_few_inodes(Bytes(before / 4 * 3)) };
    store.create(&id, &most).unwrap();
    let taken = store.space().unwrap().available.0;
    // Creating the volume took a few blocks for directories and inodes.
    assert_close(taken, before - most.capacity.round_up().unwrap().0);
    assert!(store.delete(&id).unwrap());
    assert_eq!(store.space().unwrap().available.0, taken);
    let recounted = available_after_recount();
    assert!(recounted.abs_diff(taken) <= MIB / 8, "{recounted} instead of {taken}");
    assert_eq!(store.create(&id, &most).unwrap_err().kind(), ErrorKind::NoSpace);
    store.empty_trash().unwrap();
    // The space is available immediately, though the file system frees blocks in the background.
    store.create(&id, &most).unwrap();
}

/// The store counts the limit of the project before the directory exists.
#[test]
fn a_reserved_project_needs_no_directory() {
    let _leaks = Leaks::watch();
    wait_for_deferred_frees();
    let before = available_after_recount();
    let root = File::open(xfs()).unwrap();
    let reserved = *StoreOptions::default().project_ids.start();
    quota(&root).set_limits(reserved, Limits::hard(Bytes(32 * MIB), Inodes(2))).unwrap();
    assert!(available_after_recount().abs_diff(before - 32 * MIB) <= MIB / 8);
    assert_eq!(store().recover().unwrap().released_ids, 1);
    assert!(available_after_recount().abs_diff(before) <= MIB / 8);
}

#[test]
fn other_processes_see_reservations_and_releases() {
    let store = store();
    let other = VolumeStore::open(&xfs(), StoreOptions::default()).unwrap();
    let available = |store: &VolumeStore| store.space().unwrap().available;
    let before = available(&store);
    assert_eq!(available(&other), before);
    let half = Bytes(before.0 / 2 / MIB * MIB + MIB);
    let spec = with_few_inodes(half);
    store.create(&id("first"), &spec).unwrap();
    assert_close(available(&other).0, before.0 - half.0);
    assert_fails(other.create(&id("second"), &spec), ErrorKind::NoSpace);
    remove(&other, &id("first"));
    store.create(&id("second"), &spec).unwrap();
    remove(&other, &id("second"));
    // The refused call makes the store recount, and the count then includes the blocks of the file system's
    // own metadata.
    assert!(available(&store).0.abs_diff(before.0) < MIB);
}

#[test]
fn concurrent_processes_do_not_overcommit() {
    const PROCESSES: u64 = 4;
    let store = TestStore::open();
    let before = store.space().unwrap().available;
    let spec = &VolumeSpec::new(VolumeKind::Filesystem, Bytes(before.0 / 6));
    let made: u64 = std::thread::scope(|scope| {
        let process = |number: u64| {
            let store = VolumeStore::open(&xfs(), StoreOptions::default()).unwrap();
            let create = move |turn| store.create(&id(&format!("v-{number}-{turn}")), spec);
            (0..6).map(create).filter(|made| made.is_ok()).count() as u64
        };
        let running: Vec<_> = (0..PROCESSES).map(|number| scope.spawn(move || process(number))).collect();
        running.into_iter().map(|process| process.join().unwrap()).sum()
    });
    assert_eq!(store.list().unwrap().len() as u64, made);
    assert!((1..=6).contains(&made), "{made} volumes of a sixth each");
    // What refused processes may have left.
    store.empty_trash().unwrap();
}

/// Threads of one process share the descriptors of their store, but no lock.
#[test]
fn threads_reserve_each_entry_once() {
    const THREADS: u64 = 8;
    let store = TestStore::open();
    let (source, image) = create_image(&store, "source", MIB);
    image.write_all_at(&vec![5; MIB as usize], 0).unwrap();
    let before = store.space().unwrap().available.0;
    let (spec, started) = (with_few_inodes(Bytes(MIB)), AtomicU64::new(0));
    concurrently(THREADS as usize, || {
        let own = id(&format!("own-{}", started.fetch_add(1, Ordering::Relaxed)));
        store.create_snapshot(&source, &snapshot_id("one")).unwrap();
        clone_image(&store, &source, &id("clone"), Bytes(MIB)).unwrap();
        store.create(&id("same"), &spec).unwrap();
        store.create(&own, &spec).unwrap();
    });
    store.empty_trash().unwrap();
    // A snapshot, a clone, a shared directory and those of each thread. Two images that may be written share blocks.
    let taken = (1 + 1 + 1 + THREADS) * MIB + 2 * margin(MIB);
    assert_available(&store, before - taken);
    let names = (0..THREADS).map(|own| format!("own-{own}")).chain(["same".to_owned()]);
    let project_of_volume = |name: String| project_of(File::open(entry(&id(&name))).unwrap()).unwrap();
    let projects: BTreeSet<u32> = names.map(project_of_volume).collect();
    assert_eq!(projects.len() as u64, THREADS + 1, "two volumes share a project id");
}

#[rstest]
#[case::zero(Bytes(0))]
#[case::beyond_any_file(Bytes(u64::MAX))]
fn invalid_sizes_are_refused(#[case] capacity: Bytes) {
    for kind in [VolumeKind::Filesystem, VolumeKind::Block] {
        assert_fails(store().create(&id("odd"), &VolumeSpec::new(kind, capacity)), ErrorKind::InvalidInput);
    }
}

#[test]
fn the_store_needs_an_enforcing_xfs() {
    let _leaks = Leaks::watch();
    let error = assert_fails(
        VolumeStore::open(&xfs_without_quota(), StoreOptions::default()),
        ErrorKind::NotEnforced,
    );
    assert!(error.to_string().contains("prjquota"), "{error}");

    let tmpfs = scratch();
    assert_fails(VolumeStore::open(tmpfs.path(), StoreOptions::default()), ErrorKind::NeverMounted);
    assert_eq!(std::fs::read_dir(tmpfs.path()).unwrap().count(), 0);
    assert_eq!(quota(&File::open(xfs()).unwrap()).enforcement().unwrap(), Enforcement::Enforcing);

    // A subdirectory of the right file system is not its root.
    let part = scratch();
    let directory = tempfile::tempdir_in(xfs()).unwrap();
    bind_mount(File::open(directory.path()).unwrap(), part.path(), MountFlags::default()).unwrap();
    assert_fails(VolumeStore::open(part.path(), StoreOptions::default()), ErrorKind::WrongFilesystem);
    assert!(unmount(part.path()).unwrap());
}

/// After the record beside the mount point was removed, the store accepts the other file system.
#[test]
fn a_different_filesystem_is_refused() {
    let uuid = store().filesystem_uuid().to_string();
    let record =
        xfs().with_file_name(format!("{}.filesystem-uuid", xfs().file_name().unwrap().to_str().unwrap()));
    assert_eq!(std::fs::read_to_string(&record).unwrap().trim(), uuid);
    store().verify().unwrap();

    std::fs::write(&record, "00000000-0000-4000-8000-000000000000\n").unwrap();
    let error = assert_fails(VolumeStore::open(&xfs(), StoreOptions::default()), ErrorKind::WrongFilesystem);
    for part in [uuid.as_str(), "00000000-0000-4000-8000-000000000000", record.to_str().unwrap()] {
        assert!(error.to_string().contains(part), "{part} is missing in: {error}");
    }
    std::fs::remove_file(&record).unwrap();
    store();
    // The store records the file system again.
    assert_eq!(std::fs::read_to_string(&record).unwrap().trim(), uuid);
}

#[test]
fn a_lost_mount_fails_verification() {
    let store = store();
    let covered = xfs();
    let tmpfs = scratch();
    bind_mount(File::open(tmpfs.path()).unwrap(), &covered, MountFlags::default()).unwrap();
    let error = store.verify().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::WrongFilesystem | ErrorKind::NotEnforced), "{error}");
    assert!(unmount_once(&covered));
    store.verify().unwrap();
}

#[test]
fn a_second_mount_requires_reopening() {
    let before = store();
    let data = xfs();
    bind_mount(File::open(&data).unwrap(), &data, MountFlags::default()).unwrap();
    let verified = before.verify();
    let opened = VolumeStore::open(&data, StoreOptions::default()).and_then(|again| again.verify());
    assert!(unmount_once(&data));
    assert_eq!(verified.unwrap_err().kind(), ErrorKind::NotMounted);
    opened.unwrap();
    before.verify().unwrap();
}

/// Unmounts the path once. The data file system itself is mounted there too and must stay.
fn unmount_once(path: &std::path::Path) -> bool {
    nix::mount::umount(path).is_ok()
}

/// The store reports a volume whose directory was moved to the project of another volume.
#[test]
fn project_changes_affect_no_other_volume() {
    let store = TestStore::open();
    let spec = VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB));
    let (victim, tenant) = (id("victim"), id("tenant"));
    store.create(&victim, &spec).unwrap();
    store.create(&tenant, &spec).unwrap();
    let victims_project = project_of(File::open(entry(&victim)).unwrap()).unwrap();
    std::fs::create_dir(entry(&tenant).join("deep")).unwrap();
    File::create(entry(&tenant).join("deep/file")).unwrap();
    let stolen = ProjectId::new(victims_project).unwrap();
    test_support::set_project(File::open(entry(&tenant)).unwrap(), stolen).unwrap();

    let Condition::Abnormal { reason: AbnormalReason::ProjectChanged, message: why } =
        store.stats(&tenant).unwrap().condition
    else {
        panic!("the volume is reported as healthy")
    };
    assert!(why.contains(&victims_project.to_string()), "{why}");
    store.expand(&tenant, Bytes(8 * MIB)).unwrap();
    assert_eq!(store.volume(&victim).unwrap().capacity(), Bytes(MIB), "the victim's limit was raised");
    remove(&store, &tenant);
    assert_eq!(store.volume(&victim).unwrap().capacity(), Bytes(MIB), "the victim's limit was cleared");
}

#[test]
fn removal_stays_inside_malicious_trees() {
    let (store, id) = (TestStore::open(), id("hostile"));
    store.create(&id, &directory_with(Bytes(16 * MIB), 2048)).unwrap();
    let outside = scratch();
    File::create(outside.path().join("precious")).unwrap();
    symlink(outside.path(), entry(&id).join("link")).unwrap();
    symlink("/", entry(&id).join("root")).unwrap();
    nix::unistd::mkfifo(&entry(&id).join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    File::create(entry(&id).join("name\nwith\u{7f} \"odd\" bytes")).unwrap();
    // The tree is too deep for a walk by path or with one descriptor for each level (PATH_MAX).
    let mut deep = entry(&id);
    std::env::set_current_dir(&deep).unwrap();
    for _ in 0..1100 {
        std::fs::create_dir("nested").unwrap();
        std::env::set_current_dir("nested").unwrap();
    }
    File::create("bottom").unwrap();
    std::env::set_current_dir("/").unwrap();
    // A directory that left the project cannot be renamed within the volume.
    deep.push("foreign");
    std::fs::create_dir_all(deep.join("a/b")).unwrap();
    test_support::set_project(File::open(deep.join("a")).unwrap(), project(77)).unwrap();
    std::fs::create_dir_all(deep.join("a/c/d")).unwrap();

    remove(&store, &id);
    assert!(outside.path().join("precious").exists());
}

/// A process creates directories in a deleted volume that it still has open, and each is lifted out of it.
#[test]
fn a_held_volume_delays_no_other() {
    let (store, hostile, other) = (TestStore::open(), id("hostile"), id("other"));
    for id in [&hostile, &other] {
        store.create(id, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    }
    let held = File::open(entry(&hostile)).unwrap();
    for id in [&hostile, &other] {
        assert!(store.delete(id).unwrap());
    }
    let is_in_trash = |id: &VolumeId| {
        let mut names = std::fs::read_dir(xfs().join("trash")).unwrap();
        names.any(|name| name.unwrap().file_name().to_string_lossy().starts_with(&format!("{id}.")))
    };
    let mut created = 0;
    let began = Instant::now();
    let removed = store.empty_trash_yielding(|| {
        let directory = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
        let is_empty = std::fs::read_dir(&directory).is_ok_and(|mut names| names.next().is_none());
        if is_empty && is_in_trash(&other) && began.elapsed() < Duration::from_secs(20) {
            created += 1;
            std::fs::create_dir_all(directory.join(format!("{created}/nested"))).unwrap();
        }
    });
    assert_eq!(removed.unwrap(), 2);
    assert!(began.elapsed() < Duration::from_secs(20), "{created} directories");
    drop(held);
    store.empty_trash().unwrap();
}

#[test]
fn emptying_yields_without_holding_locks() {
    let (store, other, id) = (TestStore::open(), store(), id("full"));
    store.create(&id, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    std::fs::create_dir_all(entry(&id).join("a/b")).unwrap();
    for file in ["1", "2", "a/3", "a/b/4"] {
        File::create(entry(&id).join(file)).unwrap();
    }
    assert!(store.delete(&id).unwrap());
    let mut turns = 0;
    let removed = store.empty_trash_yielding(|| {
        turns += 1;
        // Recovery takes every lock.
        other.recover().unwrap();
    });
    assert_eq!(removed.unwrap(), 1);
    assert!(turns > 4 + 2, "{turns} turns for four files and two directories");
}

#[test]
fn deleted_volumes_in_use_keep_projects() {
    let (store, id) = (TestStore::open(), id("held"));
    store.create(&id, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    let mut held = File::create(entry(&id).join("open")).unwrap();
    held.write_all(&[1; 8192]).unwrap();
    assert!(store.delete(&id).unwrap());
    assert!(store.list().unwrap().is_empty());
    assert_eq!(store.empty_trash().unwrap(), 0);
    assert_eq!(entry_count("trash"), 1, "the id would be free while files are charged to it");
    drop(held);
    assert_eq!(store.empty_trash().unwrap(), 1);
    assert_eq!(entry_count("trash"), 0);
}

#[test]
fn opening_anything_but_a_volume_fails() {
    let store = store();
    symlink("/etc", entry(&id("link"))).unwrap();
    assert_eq!(store.volume(&id("link")).unwrap_err().kind(), ErrorKind::InvalidInput);
    std::fs::remove_file(entry(&id("link"))).unwrap();
    std::fs::create_dir(entry(&id("foreign"))).unwrap();
    assert_eq!(store.volume(&id("foreign")).unwrap_err().kind(), ErrorKind::InvalidInput);
    std::fs::remove_dir(entry(&id("foreign"))).unwrap();
}

#[rstest]
fn one_concurrent_call_creates_the_volume(
    #[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind,
) {
    let (store, spec) = (TestStore::open(), VolumeSpec::new(kind, Bytes(MIB)));
    for round in 0..5 {
        let id = id(&format!("new-{round}"));
        let create = || match store.create_new(&id, &spec) {
            Ok(_) => 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
                0
            }
        };
        let made: i32 = concurrently(4, create).iter().sum();
        assert_eq!((made, create()), (1, 0));
        remove(&store, &id);
    }
}

/// As if one volume was deleted, and another one of the same id and the other kind was created, between two system calls.
#[test]
fn opening_survives_a_change_of_kind() {
    let store = TestStore::open();
    let ids = [id("directory"), id("image")];
    for (id, kind) in ids.iter().zip([VolumeKind::Filesystem, VolumeKind::Block]) {
        store.create(id, &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
    }
    let [one, other] = ids.each_ref().map(entry);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                renameat2(AT_FDCWD, &one, AT_FDCWD, &other, RenameFlags::RENAME_EXCHANGE).unwrap();
            }
        });
        let opened = (0..2000).try_for_each(|_| {
            let volume = store.volume(&ids[0])?;
            match volume.kind() {
                VolumeKind::Filesystem => volume.open_dir().map(drop),
                VolumeKind::Block => volume.open_image(Access::ReadWrite).map(drop),
            }
        });
        ended.store(true, Ordering::Relaxed);
        opened.unwrap();
    });
}
