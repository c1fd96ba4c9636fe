//! Tests with projects and directories of other programs on the file system of the store. The kubelet has both if its root
//! directory is on that file system and it measures volumes by project quotas.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use loopfs::mount::{MountFlags, bind_mount, unmount};
use loopfs::project_quota::{Limit, Limits, ProjectId, Usage, assign_project, project_of};
use loopfs::volume_store::{
    ContentSource, ForeignEvidence, Recovered, StoreOptions, VolumeKind, VolumeSpec, VolumeStore,
};
use loopfs::{Bytes, ErrorKind, Inodes, test_support};
use nix::unistd::syncfs;

use crate::environment::{
    Leaks, MIB, default_with, directory, id, project, quota, scratch, snapshot_id, store, xfs,
};
use crate::fixtures::{TestStore, assert_fails, delete_all, entry};
use crate::project_trees::fingerprint;

/// The id from which the kubelet tries ids upwards.
const FIRST_OF_KUBELET: u32 = 1_048_577;
/// The time after which a test fails that waits for the kernel.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A limit beyond the size of the disk, as the kubelet sets in order to measure usage without limiting it.
const NO_LIMIT: Bytes = Bytes(1 << 62);

fn kubelet_limits() -> Limits {
    Limits { bytes: Limit::Hard(NO_LIMIT), ..Limits::KEEP }
}

fn usage_of(id: ProjectId) -> Option<Usage> {
    let root = File::open(xfs()).unwrap();
    syncfs(&root).unwrap();
    quota(&root).finish_inactivation(id).unwrap();
    quota(&root).usage(id).unwrap()
}

fn used_ids() -> BTreeSet<ProjectId> {
    let root = File::open(xfs()).unwrap();
    quota(&root).finish_inactivation(project(1)).unwrap();
    quota(&root).ids(project(1)..=project(u32::MAX - 1)).map(|usage| usage.unwrap().id).collect()
}

/// Returns the project ids of the directories of all volumes and snapshots, by the inodes.
fn ids_of_volumes() -> BTreeSet<ProjectId> {
    let mut ids = BTreeSet::new();
    for parent in ["volumes", "snapshots"] {
        for entry in fs::read_dir(xfs().join(parent)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                let id = project(project_of(File::open(&path).unwrap()).unwrap());
                assert!(ids.insert(id), "{} shares its id", path.display());
            }
        }
    }
    ids
}

/// A directory in a project of another program.
struct Foreign {
    directory: tempfile::TempDir,
    id: ProjectId,
    usage: Option<Usage>,
    /// The soft limit, in units of 512 bytes.
    soft: u64,
    files: Vec<(PathBuf, u64, i64, i64)>,
}

impl Foreign {
    /// Creates a directory, limits its project and assigns it, in the order of the kubelet, and writes into it. The soft limit of bytes is
    /// the hard one, as the kubelet sets them.
    fn create(id: u32, limits: Limits) -> Self {
        let id = project(id);
        let directory = tempfile::tempdir_in(xfs()).unwrap();
        let root = File::open(xfs()).unwrap();
        quota(&root).set_limits(id, limits).unwrap();
        let soft = if let Limit::Hard(Bytes(bytes)) = limits.bytes { bytes / 512 } else { 0 };
        test_support::set_soft_limit(&root, id, soft).unwrap();
        assign_project(File::open(directory.path()).unwrap(), id).unwrap();
        fs::create_dir(directory.path().join("within")).unwrap();
        for name in ["a", "within/b"] {
            let mut file = File::create(directory.path().join(name)).unwrap();
            file.write_all(&[7; 40_000]).unwrap();
            file.sync_all().unwrap();
        }
        let files = fingerprint(directory.path());
        let usage = usage_of(id);
        assert_eq!(usage.map(|usage| usage.inodes), Some(Inodes(4)));
        Self { directory, id, usage, soft, files }
    }

    #[track_caller]
    fn assert_unchanged(&self, after: &str) {
        assert_eq!(usage_of(self.id), self.usage, "after {after}");
        let soft = test_support::soft_limit(File::open(xfs()).unwrap(), self.id).unwrap();
        assert_eq!(soft, self.soft, "after {after}");
        assert_eq!(fingerprint(self.directory.path()), self.files, "after {after}");
    }

    /// Removes the limits and then the directory, as the kubelet does.
    fn remove(self) {
        quota(&File::open(xfs()).unwrap()).clear_limits(self.id).unwrap();
        self.directory.close().unwrap();
        // XFS frees a deleted file only when a concurrent call of the store for all projects has let go of it.
        let start = Instant::now();
        while let Some(usage) = usage_of(self.id) {
            assert!(start.elapsed() < TIMEOUT, "still charged: {usage:?}");
        }
    }
}

/// Checks that no project of another program has changed, and that no id is used twice.
#[track_caller]
fn check(foreign: &[Foreign], range: &RangeInclusive<ProjectId>, after: &str) {
    for project in foreign {
        project.assert_unchanged(after);
    }
    let ours = ids_of_volumes();
    assert!(ours.iter().all(|id| range.contains(id)), "after {after}: {ours:?}");
    let foreign: BTreeSet<_> = foreign.iter().map(|project| project.id).collect();
    assert!(ours.is_disjoint(&foreign), "after {after}: {ours:?} and {foreign:?}");
    assert_eq!(used_ids(), &ours | &foreign, "after {after}");
}

/// Projects of other programs keep their limits, usage and ids during all operations of the store.
#[test]
fn foreign_projects_stay_unchanged() {
    let _leaks = Leaks::watch();
    let store = store();
    let range = StoreOptions::default().project_ids;
    let (first, last) = (range.start().get(), range.end().get());
    let mut foreign: Vec<_> =
        [1, FIRST_OF_KUBELET, first - 1].map(|id| Foreign::create(id, kubelet_limits())).into();
    let spec = |kind| VolumeSpec::new(kind, Bytes(MIB));
    for n in 0..6 {
        store.create(&id(&format!("fs-{n}")), &spec(VolumeKind::Filesystem)).unwrap();
    }
    store.create(&id("block"), &spec(VolumeKind::Block)).unwrap();
    check(&foreign, &range, "creation");

    let hard = Limits::hard(Bytes(MIB), Inodes(64));
    foreign.extend([FIRST_OF_KUBELET + 1, u32::MAX - 1].map(|id| Foreign::create(id, kubelet_limits())));
    foreign.push(Foreign::create(last + 1, hard));
    fs::write(entry(&id("fs-0")).join("file"), [1; 10_000]).unwrap();
    store.expand(&id("fs-0"), Bytes(2 * MIB)).unwrap();
    let kept = snapshot_id("kept");
    store.create_snapshot(&id("fs-0"), &kept).unwrap();
    let larger = VolumeSpec::new(VolumeKind::Filesystem, Bytes(2 * MIB));
    store.clone_from(ContentSource::Snapshot(&kept), &id("clone"), &larger).unwrap();
    check(&foreign, &range, "expansion, snapshot and clone");

    assert_eq!(store.foreign_evidence().unwrap(), ForeignEvidence::default());
    assert_eq!(store.find_foreign_files(None, || ()).unwrap(), []);
    assert_eq!(store.repair_project(&id("fs-0")).unwrap(), 0);
    check(&foreign, &range, "the search");

    foreign.remove(1).remove();
    for volume in ["fs-1", "fs-2", "block"] {
        assert!(store.delete(&id(volume)).unwrap());
    }
    assert_eq!(store.empty_trash().unwrap(), 3);
    check(&foreign, &range, "deletion");

    // The directory has not been created when the process dies.
    quota(&File::open(xfs()).unwrap()).set_limits(project(last), hard).unwrap();
    drop(store);
    let store = crate::environment::store();
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.released_ids = 1));
    check(&foreign, &range, "recovery");

    delete_all(&store);
    assert_eq!(store.recover().unwrap(), Recovered::default());
    check(&foreign, &range, "the deletion of all volumes");
    foreign.into_iter().for_each(Foreign::remove);
}

/// No program should use ids of the store's range. If one does, its directories are not harmed.
#[test]
fn foreign_ids_are_never_allocated() {
    const COUNT: u32 = 8;
    const FIRST: u32 = 6_700_001;
    let _leaks = Leaks::watch();
    drop(store());
    let range = project(FIRST)..=project(FIRST + COUNT - 1);
    let options = StoreOptions { project_ids: range.clone(), ..StoreOptions::default() };
    let store = VolumeStore::open(&xfs(), options).unwrap();
    let hard = Limits::hard(Bytes(MIB), Inodes(64));
    let mut foreign = vec![Foreign::create(FIRST, hard), Foreign::create(FIRST + COUNT - 1, hard)];
    let spec = VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB));
    store.create(&id("v-0"), &spec).unwrap();
    // The allocator tries the id after the one that it allocated last, which another program has taken in the meantime.
    let unused = |id: &u32| !used_ids().contains(&project(*id));
    let next = ids_of_volumes().first().unwrap().get() + 1;
    let taken = Some(next).filter(unused).or_else(|| (FIRST..FIRST + COUNT).find(unused)).unwrap();
    // Without limits, it is none that the store could have reserved.
    foreign.push(Foreign::create(taken, Limits::KEEP));
    for n in 1..COUNT - 3 {
        store.create(&id(&format!("v-{n}")), &spec).unwrap();
    }
    check(&foreign, &range, "creation");
    assert_fails(store.create(&id("one-more"), &spec), ErrorKind::NoSpace);
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.busy_ids = 2));
    check(&foreign, &range, "recovery");

    delete_all(&store);
    assert_eq!(store.recover().unwrap(), default_with(|found: &mut Recovered| found.busy_ids = 2));
    check(&foreign, &range, "the deletion of all volumes");
    foreign.into_iter().for_each(Foreign::remove);
}

/// The owner of a file can give it any project id. Such an id has no limits, so the store has never reserved it.
#[test]
fn ids_without_limits_are_no_orphans() {
    const COUNT: u32 = 50;
    let store = TestStore::open();
    let (directory, first) = (directory(), StoreOptions::default().project_ids.start().get());
    for n in 0..COUNT {
        let path = directory.path().join(n.to_string());
        fs::create_dir(&path).unwrap();
        assign_project(File::open(path).unwrap(), project(first + n)).unwrap();
    }
    assert_eq!(store.recover().unwrap(), Recovered::default());
}

/// Returns the id that the kubelet would choose: the first one from [`FIRST_OF_KUBELET`] on that has no usage.
fn next_of_kubelet() -> u32 {
    let root = File::open(xfs()).unwrap();
    let unused = |id: &u32| quota(&root).usage(project(*id)).unwrap().is_none_or(|usage| usage.is_empty());
    (FIRST_OF_KUBELET..).find(unused).unwrap()
}

#[test]
fn store_and_kubelet_share_no_id() {
    const EACH: usize = 30;
    let store = TestStore::open();
    let range = StoreOptions::default().project_ids;
    let spec = VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB));
    let foreign = std::thread::scope(|scope| {
        let kubelet = scope.spawn(|| {
            let mut kept = Vec::new();
            for n in 0..EACH {
                let made = Foreign::create(next_of_kubelet(), kubelet_limits());
                if n % 2 == 0 { kept.push(made) } else { made.remove() }
            }
            kept
        });
        for n in 0..EACH {
            store.create(&id(&format!("v-{n}")), &spec).unwrap();
            if n % 2 == 1 {
                assert!(store.delete(&id(&format!("v-{n}"))).unwrap());
                store.empty_trash().unwrap();
            }
            if n % 10 == 9 {
                assert_eq!(store.recover().unwrap(), Recovered::default());
            }
        }
        kubelet.join().unwrap()
    });
    assert_eq!((foreign.len(), ids_of_volumes().len()), (EACH / 2, EACH / 2));
    check(&foreign, &range, "all allocations");
    // What could not be freed beside the kubelet.
    store.empty_trash().unwrap();
    delete_all(&store);
    check(&foreign, &range, "the deletion of all volumes");
    foreign.into_iter().for_each(Foreign::remove);
}

/// The directory lies beside those of the store, has entries of the same names, and stays unchanged.
#[test]
fn a_foreign_directory_is_no_volume() {
    let (store, target, published) = (TestStore::open(), scratch(), scratch());
    // The same names as in the store, below a directory of the kubelet.
    let kubelet = xfs().join("kubelet");
    for name in ["volumes/pod", "staging/pod", "trash/pod", ".loopfs/users"] {
        fs::create_dir_all(kubelet.join(name)).unwrap();
    }
    fs::write(kubelet.join("volumes/image"), [1; 4096]).unwrap();
    let before = fingerprint(&kubelet);
    let of_kubelet = File::open(&kubelet).unwrap();
    bind_mount(&of_kubelet, target.path(), MountFlags::default()).unwrap();
    let within = File::open(kubelet.join("volumes/pod")).unwrap();
    bind_mount(&within, published.path(), MountFlags::default()).unwrap();

    store.verify().unwrap();
    assert_eq!(store.list().unwrap(), []);
    let spec = VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB));
    for name in ["kubelet", "pod"] {
        assert_eq!(store.volume(&id(name)).unwrap_err().kind(), ErrorKind::NotFound);
        store.create(&id(name), &spec).unwrap();
        assert!(store.delete(&id(name)).unwrap(), "the mount of the kubelet counts as use of a volume");
    }
    assert_eq!(store.empty_trash().unwrap(), 2);
    assert_eq!(store.recover().unwrap(), Recovered::default());
    assert_eq!(store.find_foreign_files(None, || ()).unwrap(), []);
    assert_fails(VolumeStore::open(target.path(), StoreOptions::default()), ErrorKind::WrongFilesystem);

    assert_eq!(fingerprint(&kubelet), before);
    for place in [&published, &target] {
        assert!(unmount(place.path()).unwrap());
    }
    drop((of_kubelet, within));
    fs::remove_dir_all(&kubelet).unwrap();
}
