//! Checks a disk after a power cut: the store recovers, and nothing is lost or leaked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use loopfs::Bytes;
use loopfs::loop_device::Access;
use loopfs::project_quota::{ProjectId, ProjectQuota, Usage, project_of};
use loopfs::volume_store::{Condition, Recovered, Snapshot, StoreOptions, Volume, VolumeKind, VolumeStore};

use crate::expected::{Expected, Found};
use crate::journal;
use crate::line::Line;
use crate::work::{content, offset};

/// The tolerance for what the file system itself uses. It is smaller than any volume.
const TOLERANCE: u64 = 1 << 20;

#[test]
fn nothing_is_lost_and_nothing_leaks() {
    let root = crate::xfs();
    let lines = journal::read(&root).expect("the journal");
    assert!(!lines.is_empty(), "the journal is empty");
    let expected = Expected::of(&lines);

    let store = crate::store();
    // The space is counted before recovery, which must return the freed space to this count as well.
    store.space().expect("space");
    println!("{} lines; {:?}", lines.len(), store.recover().expect("recover"));
    println!("{} volumes out of the trash", store.empty_trash().expect("empty the trash"));
    let again = store.recover().expect("recover again");
    assert_eq!(again, Recovered::default(), "a second recovery finds nothing to do");
    for directory in ["staging", "trash"] {
        assert_eq!(entries(&root.join(directory)), Vec::<String>::new(), "{directory}");
    }

    let volumes = volumes(&store);
    let snapshots = snapshots(&store);
    let of_snapshots = snapshots.iter().map(|snapshot| snapshot_found(snapshot, &root, &expected));
    let found = volumes.iter().map(|volume| found(volume, &root, &expected)).chain(of_snapshots).collect();
    let differences = expected.differences(&found);
    let journal_text = || lines.iter().map(Line::to_string).collect::<Vec<_>>().join("; ");
    assert!(differences.is_empty(), "{}\njournal: {}", differences.join("\n"), journal_text());
    assert_eq!(
        projects_of(&volumes, &snapshots, &root),
        limits(&root),
        "(project id, limit) of volumes and snapshots, and of the quota"
    );
    let shares = |volume: &Volume| expected.0.get(volume.id().as_str()).is_some_and(|volume| volume.shares);
    for volume in volumes.iter().filter(|volume| volume.kind() == VolumeKind::Block) {
        assert_exactly_preallocated(volume);
    }

    // Shared blocks are reserved for each volume that shares them. The other volumes are counted here.
    let (sharing, volumes): (Vec<Volume>, Vec<Volume>) = volumes.into_iter().partition(shares);
    remove(&store, sharing, snapshots);
    let unreserved = unreserved(&volumes, &root);
    let kept = store.space().expect("space");
    std::fs::remove_file(root.join(".loopfs/promised")).expect("remove the reservation record");
    let fresh = crate::store().space().expect("space");
    let of_inodes = unreserved.0.checked_sub(fresh.available.0);
    assert!(
        of_inodes.is_some_and(|bytes| bytes <= most_for_inodes(&root)),
        "the recounted space that is not reserved is {}, {unreserved} without inodes",
        fresh.available
    );
    let off = kept.available.0.abs_diff(fresh.available.0);
    assert!(off < TOLERANCE, "the total kept through recovery is {kept:?}, the recount is {fresh:?}");

    remove(&store, volumes, Vec::new());
    assert_eq!(usages(&root), [], "project ids without volumes");
    for directory in ["volumes", "snapshots", "staging", "trash"] {
        assert_eq!(entries(&root.join(directory)), Vec::<String>::new(), "{directory}");
    }
}

fn remove(store: &VolumeStore, volumes: Vec<Volume>, snapshots: Vec<Snapshot>) {
    let count = volumes.len() + snapshots.len();
    for volume in volumes {
        assert!(store.delete(volume.id()).expect("delete"));
    }
    for snapshot in snapshots {
        assert!(store.delete_snapshot(snapshot.id()).expect("delete a snapshot"));
    }
    assert_eq!(store.empty_trash().expect("empty the trash"), count);
}

fn entries(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("a directory of the store");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

fn volumes(store: &VolumeStore) -> Vec<Volume> {
    let ids = store.list().expect("list");
    ids.iter().map(|id| store.volume(id).unwrap_or_else(|error| panic!("{error}"))).collect()
}

fn snapshots(store: &VolumeStore) -> Vec<Snapshot> {
    let ids = store.snapshots().expect("list of snapshots");
    ids.iter().map(|id| store.snapshot(id).unwrap_or_else(|error| panic!("{error}"))).collect()
}

fn found(volume: &Volume, root: &Path, expected: &Expected) -> (String, Found) {
    let id = volume.id().as_str();
    let stats = volume.stats().expect("stats");
    assert_eq!(stats.condition, Condition::Healthy, "{id}");
    assert_eq!(stats.capacity, volume.capacity(), "{id}");
    assert_eq!(volume.annotations().expect("annotations").get("claim"), Some(id));
    let confirmed = expected.0.get(id).is_some_and(|volume| volume.is_confirmed());
    assert!(!confirmed || !volume.is_pending().expect("pending"), "the confirmation of {id} is lost");
    let intact = intact(id, volume.kind(), &root.join("volumes").join(id), expected);
    (id.to_owned(), Found { kind: volume.kind(), capacity: volume.capacity().0, intact })
}

fn snapshot_found(snapshot: &Snapshot, root: &Path, expected: &Expected) -> (String, Found) {
    let id = snapshot.id().as_str();
    let intact = intact(id, snapshot.kind(), &root.join("snapshots").join(id), expected);
    (id.to_owned(), Found { kind: snapshot.kind(), capacity: snapshot.capacity().0, intact })
}

/// Returns the numbers of the written blocks that hold their content.
fn intact(id: &str, kind: VolumeKind, path: &Path, expected: &Expected) -> BTreeSet<u64> {
    let written = expected.0.get(id).map(|volume| volume.written.clone()).unwrap_or_default();
    let read = |block: u64| match kind {
        VolumeKind::Filesystem => std::fs::read(path.join(block.to_string())),
        VolumeKind::Block => {
            let mut bytes = vec![0; 4096];
            File::open(path)?.read_exact_at(&mut bytes, offset(block)).map(|()| bytes)
        }
    };
    let intact = |block: &u64| matches!(read(*block), Ok(bytes) if bytes == content(*block));
    written.into_iter().filter(intact).collect()
}

fn image(volume: &Volume, access: Access) -> File {
    File::from(volume.open_image(access).expect("the image"))
}

/// Checks that the image is preallocated and has no blocks past its end. Truncating a file to its own length
/// frees the blocks past its end.
fn assert_exactly_preallocated(volume: &Volume) {
    let image = image(volume, Access::ReadWrite);
    let before = image.metadata().expect("the image's status");
    assert_eq!(before.len(), volume.capacity().0, "{}", volume.id());
    assert!(before.blocks() * 512 >= before.len(), "{} is not preallocated", volume.id());
    image.set_len(before.len()).expect("truncate");
    let after = image.metadata().expect("the image's status");
    assert_eq!(before.blocks(), after.blocks(), "{} had blocks past its end", volume.id());
}

/// Returns the project id of every directory, with the capacity of its volume or the usage of its snapshot.
fn projects_of(volumes: &[Volume], snapshots: &[Snapshot], root: &Path) -> BTreeMap<u32, u64> {
    let project = |parent: &str, id: &str| {
        let directory = File::open(root.join(parent).join(id)).expect("a directory");
        project_of(&directory).expect("its project")
    };
    let volumes = volumes.iter().filter(|volume| volume.kind() == VolumeKind::Filesystem);
    let snapshots = snapshots.iter().filter(|snapshot| snapshot.kind() == VolumeKind::Filesystem);
    let of_volumes = volumes.map(|volume| (project("volumes", volume.id().as_str()), volume.capacity().0));
    // A limit of 0 bytes would be no limit.
    let of_snapshots = snapshots.map(|snapshot| {
        let used = snapshot.used().expect("what a snapshot uses").0;
        (project("snapshots", snapshot.id().as_str()), used.max(4096))
    });
    of_volumes.chain(of_snapshots).collect()
}

fn limits(root: &Path) -> BTreeMap<u32, u64> {
    let limit = |usage: &Usage| (usage.id.get(), usage.limits.bytes.map_or(0, |bytes| bytes.0));
    usages(root).iter().map(limit).collect()
}

/// Returns the usage of every id in the store's range, after the file system has finished its deferred inode
/// inactivation.
fn usages(root: &Path) -> Vec<Usage> {
    let root = File::open(root).expect("the file system");
    let quota = ProjectQuota::of(root.as_fd());
    quota.finish_inactivation(ProjectId::new(1).expect("an id")).expect("finish frees");
    let usages = quota.ids(StoreOptions::default().project_ids);
    usages.map(|usage| usage.expect("a quota")).collect()
}

/// Returns the most space that the inodes of volumes reserve, and those outside of volumes, in four groups.
fn most_for_inodes(root: &Path) -> u64 {
    let limits = usages(root).into_iter().map(|usage| usage.limits.inodes.unwrap_or_default().0);
    (limits.sum::<u64>() + 1024) * 4 * 512 * 129 / 128
}

/// Returns the space that can be reserved, without that of inodes, after the deferred inode inactivation: the free space, minus
/// what is reserved for volumes and not used by them.
fn unreserved(volumes: &[Volume], root: &Path) -> Bytes {
    let in_directories: u64 = usages(root).iter().map(|usage| usage.bytes.0).sum();
    let reserved: u64 = volumes.iter().map(|volume| volume.capacity().0).sum();
    let images = volumes.iter().filter(|volume| volume.kind() == VolumeKind::Block);
    let in_images: u64 =
        images.map(|volume| image(volume, Access::ReadOnly).metadata().expect("status").blocks() * 512).sum();
    let status = nix::sys::statvfs::statvfs(root).expect("statfs");
    let free = status.blocks_available() * status.fragment_size();
    Bytes((free + in_directories + in_images).saturating_sub(reserved).min(free))
}
