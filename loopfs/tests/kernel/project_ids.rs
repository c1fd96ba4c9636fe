//! Tests of project ids: allocation, release and recovery after a crash.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Stdio;

use loopfs::project_quota::{
    Limit, Limits, ProjectId, ProjectIds, Reclaimed, Release, assign_project, project_of,
};
use loopfs::volume_store::{StoreOptions, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, ErrorKind, Inodes};

use crate::environment::{
    Leaks, MIB, directory, id, project, quota, scratch, store, this_test_again, xfs, xfs_without_quota,
};
use crate::fixtures::{TestStore, assert_fails};

const SOME: Limits = Limits::hard(Bytes(MIB), Inodes(64));
/// Set in a child process; the value is the path of the lock file.
const CHILD: &str = "LOOPFS_TEST_LOCK";

fn range(first: u32, count: u32) -> RangeInclusive<ProjectId> {
    project(first)..=project(first + count - 1)
}

fn all(range: &RangeInclusive<ProjectId>) -> HashSet<ProjectId> {
    (range.start().get()..=range.end().get()).map(project).collect()
}

/// Opens the ids as another process does. The instances share only the lock file.
fn open(lock: &Path, range: RangeInclusive<ProjectId>) -> ProjectIds {
    let lock = File::options().read(true).write(true).create(true).truncate(false).open(lock).unwrap();
    ProjectIds::new(File::open(xfs()).unwrap(), &lock, range).unwrap()
}

fn used(range: RangeInclusive<ProjectId>) -> HashSet<ProjectId> {
    quota(&File::open(xfs()).unwrap()).ids(range).map(|usage| usage.unwrap().id).collect()
}

#[test]
fn an_exhausted_range_is_an_error() {
    let _leaks = Leaks::watch();
    let (scratch, range) = (scratch(), range(6_000_001, 8));
    let ids = open(&scratch.path().join("lock"), range.clone());
    let taken: HashSet<_> = (0..8).map(|_| ids.reserve(SOME).unwrap()).collect();
    assert_eq!(taken, all(&range));
    let error = assert_fails(ids.reserve(SOME), ErrorKind::NoSpace);
    for end in [range.start(), range.end()] {
        assert!(error.to_string().contains(&end.to_string()), "{error}");
    }
    assert_eq!(ids.release(project(6_000_005)).unwrap(), Release::Freed);
    assert_eq!(ids.reserve(SOME).unwrap(), project(6_000_005), "the allocator finds the only free id");
    for id in taken {
        assert_eq!(ids.release(id).unwrap(), Release::Freed);
        assert_eq!(ids.release(id).unwrap(), Release::Freed, "releasing again succeeds");
    }
}

#[test]
fn processes_and_threads_share_no_id() {
    const EACH: u32 = 20;
    const PROCESSES: u32 = 3;
    const THREADS: u32 = 2;
    // The range has exactly as many ids as are allocated. If an id were allocated twice, another allocation would fail.
    let range = range(6_100_001, PROCESSES * THREADS * EACH);
    if let Some(lock) = std::env::var_os(CHILD) {
        let ids = open(lock.as_ref(), range);
        // The parent closes the input when all children are ready.
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| (0..EACH).for_each(|_| println!("took {}", ids.reserve(SOME).unwrap())));
            }
        });
        return;
    }
    let _leaks = Leaks::watch();
    let scratch = scratch();
    let lock = scratch.path().join("lock");
    let ids = open(&lock, range.clone());
    let children: Vec<_> = (0..PROCESSES)
        .map(|_| this_test_again(CHILD, &lock).stdin(Stdio::piped()).spawn().unwrap())
        .collect();
    let mut taken = Vec::new();
    // All inputs are closed before any output is awaited.
    let children: Vec<_> = children.into_iter().map(|mut child| (child.stdin.take(), child).1).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        taken.extend(text.lines().filter_map(|line| line.split_once("took ")?.1.parse().ok()).map(project));
    }
    assert_eq!(taken.len(), (PROCESSES * THREADS * EACH) as usize);
    assert_eq!(taken.iter().copied().collect::<HashSet<_>>(), all(&range));
    assert_eq!(ids.reserve(SOME).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(ids.recover(&HashSet::new()).unwrap().freed.len(), taken.len());
}

/// Crashes have left ids at each step of an allocation, and ids outside of the range stay as well.
#[test]
fn recovery_frees_only_unused_ids() {
    let _leaks = Leaks::watch();
    let (scratch, range) = (scratch(), range(6_200_001, 1000));
    let lock = scratch.path().join("lock");
    let foreign = [project(6_200_000), project(6_201_001)];
    let root = File::open(xfs()).unwrap();
    for id in foreign {
        quota(&root).set_limits(id, SOME).unwrap();
    }
    let before = open(&lock, range.clone());
    let reserved = before.reserve(SOME).unwrap();
    let (living, unnamed, removed) = (directory(), directory(), directory());
    let [of_living, of_unnamed, of_removed] = [&living, &unnamed, &removed]
        .map(|directory| before.create(File::open(directory.path()).unwrap(), SOME).unwrap());
    removed.close().unwrap();
    drop(before);

    let after = open(&lock, range.clone());
    let assigned = HashSet::from([of_living]);
    let reclaimed = after.recover(&assigned).unwrap();
    assert_eq!(HashSet::from_iter(reclaimed.freed), HashSet::from([reserved, of_removed]));
    let draining: Vec<_> = reclaimed.draining.iter().map(|usage| (usage.id, usage.inodes)).collect();
    // A directory that is not named to recovery is charged all the same.
    assert_eq!(draining, [(of_unnamed, Inodes(1))]);
    assert_eq!(used(range.clone()), HashSet::from([of_living, of_unnamed]));

    unnamed.close().unwrap();
    assert_eq!(after.retry_draining(&assigned).unwrap().freed, [of_unnamed]);
    // A second recovery finds nothing to do.
    assert_eq!(after.recover(&assigned).unwrap(), Reclaimed::default());
    assert_eq!(used(range.clone()), HashSet::from([of_living]));
    let limits = quota(&root).usage(of_living).unwrap().unwrap().limits;
    assert_eq!((limits.bytes, limits.inodes), (Some(Bytes(MIB)), Some(Inodes(64))));

    living.close().unwrap();
    assert_eq!(after.release(of_living).unwrap(), Release::Freed);
    for id in foreign {
        assert!(quota(&root).usage(id).unwrap().is_some(), "recovery changed an id outside the range");
        assert_eq!(after.release(id).unwrap_err().kind(), ErrorKind::InvalidInput);
        quota(&root).clear_limits(id).unwrap();
    }
}

/// The id drains until the file is closed, and is not allocated in the meantime.
#[test]
fn an_open_file_keeps_its_id() {
    let _leaks = Leaks::watch();
    let (scratch, range) = (scratch(), range(6_300_001, 1));
    let lock = scratch.path().join("lock");
    let ids = open(&lock, range.clone());
    let directory = directory();
    let id = ids.create(File::open(directory.path()).unwrap(), SOME).unwrap();
    let file = File::create(directory.path().join("file")).unwrap();
    directory.close().unwrap();
    let Release::Draining(usage) = ids.release(id).unwrap() else { panic!("a file is charged to the id") };
    // The open file, and the directory that it keeps from being freed.
    assert_eq!((usage.id, usage.inodes), (id, Inodes(2)));
    assert_eq!(ids.draining(), [id]);
    assert_eq!(ids.reserve(SOME).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(ids.retry_draining(&HashSet::new()).unwrap().draining.len(), 1);
    // Another process, or this one after a crash, finds the same state.
    let other = open(&lock, range);
    assert_eq!(other.reserve(SOME).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(other.recover(&HashSet::new()).unwrap().draining.len(), 1);

    drop(file);
    assert_eq!(other.retry_draining(&HashSet::new()).unwrap().freed, [id]);
    // An id that another process freed is free.
    assert_eq!(ids.retry_draining(&HashSet::new()).unwrap().freed, [id]);
    assert_eq!((ids.draining(), other.draining()), (vec![], vec![]));
    assert_eq!(ids.reserve(SOME).unwrap(), id);
    assert_eq!(ids.release(id).unwrap(), Release::Freed);
}

/// Another process has freed the id and allocated it again.
#[test]
fn a_reallocated_id_is_not_released() {
    let _leaks = Leaks::watch();
    let (scratch, range) = (scratch(), range(6_400_001, 1));
    let lock = scratch.path().join("lock");
    let (ids, other) = (open(&lock, range.clone()), open(&lock, range));
    let first = directory();
    let id = ids.create(File::open(first.path()).unwrap(), SOME).unwrap();
    assert!(matches!(ids.release(id).unwrap(), Release::Draining(_)));
    first.close().unwrap();
    assert_eq!(other.release(id).unwrap(), Release::Freed);
    let second = directory();
    assert_eq!(other.create(File::open(second.path()).unwrap(), SOME).unwrap(), id);

    // The id is kept even if the caller does not know that a directory uses it.
    assert_eq!(ids.retry_draining(&HashSet::new()).unwrap().draining.len(), 1);
    assert_eq!(ids.retry_draining(&HashSet::from([id])).unwrap(), Reclaimed::default());
    assert_eq!(ids.draining(), [], "the id is no longer listed as draining");
    let usage = quota(&File::open(xfs()).unwrap()).usage(id).unwrap().unwrap();
    assert_eq!(usage.limits.bytes, Some(Bytes(MIB)), "the new owner lost its limit");
    second.close().unwrap();
    assert_eq!(other.release(id).unwrap(), Release::Freed);
}

/// The directory stays in its previous project.
#[test]
fn a_failed_creation_leaves_no_id() {
    let _leaks = Leaks::watch();
    let (scratch, tmpfs, range) = (scratch(), scratch(), range(6_500_001, 4));
    let ids = open(&scratch.path().join("lock"), range.clone());
    let refused = |directory: &Path, limits| ids.create(File::open(directory).unwrap(), limits).unwrap_err();

    let plain = tempfile::tempdir_in(xfs_without_quota()).unwrap();
    let error = refused(plain.path(), SOME);
    assert_eq!(error.kind(), ErrorKind::NotHonoured, "limited here, charged there: {error}");
    assert_eq!(project_of(File::open(plain.path()).unwrap()).unwrap(), 0, "the tag was left");
    assert_eq!(refused(tmpfs.path(), SOME).kind(), ErrorKind::Unsupported);

    let directory = directory();
    for nothing in [Limits::UNLIMITED, Limits::KEEP] {
        assert_eq!(refused(directory.path(), nothing).kind(), ErrorKind::InvalidInput);
    }
    let zero = Limits { bytes: Limit::Hard(Bytes(0)), ..Limits::KEEP };
    assert_eq!(refused(directory.path(), zero).kind(), ErrorKind::InvalidInput);
    assert_eq!(project_of(File::open(directory.path()).unwrap()).unwrap(), 0);
    assign_project(File::open(directory.path()).unwrap(), project(6_599_999)).unwrap();
    assert_eq!(refused(directory.path(), SOME).kind(), ErrorKind::AlreadyExists);
    assert_eq!(project_of(File::open(directory.path()).unwrap()).unwrap(), 6_599_999);

    assert_eq!(used(range), HashSet::new());
    assert_eq!(ids.draining(), []);
}

#[test]
fn a_thousand_ids_are_adjacent() {
    let _leaks = Leaks::watch();
    let (scratch, range) = (scratch(), range(7_000_001, 1 << 24));
    let ids = open(&scratch.path().join("lock"), range.clone());
    let taken: Vec<_> = (0..1000).map(|_| ids.reserve(SOME).unwrap().get()).collect();
    assert_eq!(used(range).len(), 1000);
    let near = taken.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
    assert!(near >= 998, "XFS never frees a block of quota records: {near} of 999 ids are near");
    assert_eq!(ids.recover(&HashSet::new()).unwrap().freed.len(), 1000);
}

#[test]
fn an_empty_range_is_refused() {
    let root = File::open(xfs()).unwrap();
    let reversed = RangeInclusive::new(project(2), project(1));
    assert_fails(ProjectIds::new(&root, &root, reversed), ErrorKind::InvalidInput);
}

#[test]
fn stores_keep_each_others_limits() {
    let _leaks = Leaks::watch();
    drop(store());
    let options = StoreOptions { project_ids: range(6_600_001, 1), ..StoreOptions::default() };
    let open = || VolumeStore::open(&xfs(), options.clone()).unwrap();
    let (a, b) = (open(), open());
    let spec = VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB));
    let held = a.create(&id("held"), &spec).unwrap().open_dir().unwrap();
    assert!(a.delete(&id("held")).unwrap());
    a.empty_trash().unwrap();
    assert_eq!(b.create(&id("new"), &spec).unwrap_err().kind(), ErrorKind::NoSpace, "the id is draining");

    drop(held);
    assert_eq!(b.recover().unwrap().released_ids, 1);
    b.create(&id("new"), &spec).unwrap();
    a.empty_trash().unwrap();
    // The earlier limit of the id was not released a second time.
    assert_eq!(a.space().unwrap().reserved, Bytes(MIB));
    assert_eq!(b.volume(&id("new")).unwrap().capacity(), Bytes(MIB));
    assert_eq!(a.stats(&id("new")).unwrap().capacity, Bytes(MIB));

    // The volume can be deleted as any other.
    assert!(a.delete(&id("new")).unwrap());
    assert_eq!(a.empty_trash().unwrap(), 1);
    assert_eq!(used(range(6_600_001, 1)), HashSet::new());
}

/// A store with entries cannot be opened with another range.
#[test]
fn a_store_keeps_its_id_range() {
    let open = |options: &StoreOptions| VolumeStore::open(&xfs(), options.clone());
    let others = StoreOptions { project_ids: range(6_610_001, 8), ..StoreOptions::default() };
    let store = TestStore::open();
    store.create(&id("kept"), &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    for error in [open(&others).unwrap_err(), VolumeStore::open_existing(&xfs(), others.clone()).unwrap_err()]
    {
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains("1275068416 to 1291845631"), "{error}");
    }
    assert!(store.delete(&id("kept")).unwrap());
    assert!(open(&others).is_err(), "the trash has an entry");
    store.empty_trash().unwrap();
    open(&others).unwrap();
    open(&StoreOptions::default()).unwrap();
}

/// XFS keeps thirty quota records in a block, and never frees the block.
#[test]
fn freed_ids_are_allocated_again() {
    let _leaks = Leaks::watch();
    let create = |store: &VolumeStore, name: &str| {
        store.create(&id(name), &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
        project_of(File::open(xfs().join("volumes").join(name)).unwrap()).unwrap()
    };
    let delete = |store: &VolumeStore, name: &str| {
        assert!(store.delete(&id(name)).unwrap());
        store.empty_trash().unwrap();
    };
    let before = store();
    let (kept, freed) = (create(&before, "kept"), create(&before, "freed"));
    delete(&before, "freed");
    assert_eq!(create(&before, "again"), freed);
    delete(&before, "again");
    drop(before);

    let restarted = store();
    restarted.recover().unwrap();
    assert_eq!(create(&restarted, "restarted") / 30, kept / 30);
    for name in ["kept", "restarted"] {
        delete(&restarted, name);
    }
}
