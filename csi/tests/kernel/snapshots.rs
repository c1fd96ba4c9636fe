//! Tests of snapshots, and of volumes that are created from snapshots and from other volumes.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use csi_wire::csi as wire;
use loopfs::Bytes;
use loopfs::volume_store::{VolumeKind, VolumeSpec};
use rstest::rstest;
use tonic::{Code, Status};

use crate::fixture::{Fixture, id, is_block_device, read_from, write_to};
use crate::support::*;

const FOUR: i64 = 4 << 20;
const EIGHT: i64 = 8 << 20;

/// Returns a content of more than a block that differs at each position.
fn content(seed: u8) -> Vec<u8> {
    (0..3 * 4096u32).map(|n| (n.wrapping_mul(31) >> 3) as u8 ^ seed).collect()
}

/// Writes to a published volume.
fn write(target: &Path, seed: u8) {
    if is_block_device(target) {
        return write_to(target, &content(seed)).unwrap();
    }
    let directory = target.join("directory");
    fs::create_dir_all(&directory).unwrap();
    let file = directory.join("file");
    fs::write(&file, content(seed)).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(&file, Some(1000), Some(2000)).unwrap();
}

#[track_caller]
fn assert_holds(target: &Path, seed: u8) {
    if is_block_device(target) {
        assert!(read_from(target, content(seed).len()) == content(seed), "not {seed}");
        return;
    }
    let file = target.join("directory/file");
    assert!(fs::read(&file).unwrap() == content(seed), "not {seed}");
    let found = fs::metadata(&file).unwrap();
    assert_eq!((found.mode() & 0o777, found.uid(), found.gid()), (0o640, 1000, 2000));
}

fn take(fixture: &Fixture, name: &str, volume: &str) -> wire::Snapshot {
    fixture.node().create_snapshot(create_snapshot(name, volume)).unwrap().snapshot.unwrap()
}

fn created(response: Result<wire::CreateVolumeResponse, Status>) -> wire::Volume {
    response.unwrap().volume.unwrap()
}

fn publish_volume(fixture: &Fixture, volume: &str, kind: VolumeKind) -> std::path::PathBuf {
    let target = fixture.target(volume);
    fixture.node().node_publish_volume(publish(volume, &target, capability_of(kind))).unwrap();
    target
}

fn unpublish_volume(fixture: &Fixture, volume: &str) {
    fixture.node().node_unpublish_volume(unpublish(volume, &fixture.target(volume))).unwrap();
}

#[rstest]
#[case::directory(VolumeKind::Filesystem)]
#[case::device(VolumeKind::Block)]
fn snapshot_of_used_volume_is_restorable(#[case] kind: VolumeKind) {
    let mut fixture = Fixture::new();
    fixture.node().create_volume(create("v", FOUR, capability_of(kind))).unwrap();
    let target = publish_volume(&fixture, "v", kind);
    write(&target, 1);
    let before = SystemTime::now() - Duration::from_secs(1);
    let snapshot = take(&fixture, "s", "v");
    write(&target, 2);
    assert_eq!((snapshot.snapshot_id.as_str(), snapshot.source_volume_id.as_str()), ("s", "v"));
    assert_eq!((snapshot.size_bytes, snapshot.ready_to_use), (FOUR, true));
    assert_eq!(snapshot.accessible_topology, [topology(NODE)]);
    let taken = SystemTime::try_from(snapshot.creation_time.unwrap()).unwrap();
    assert!((before..=SystemTime::now()).contains(&taken), "{taken:?}");

    // Another driver returns the same snapshot, even after the volume was expanded.
    fixture.restart_driver();
    fixture.node().controller_expand_volume(controller_expand("v", EIGHT, 0)).unwrap();
    assert_eq!(take(&fixture, "s", "v"), snapshot);

    let copies =
        [from_snapshot("r", "s", 0, capability_of(kind)), from_volume("c", "v", EIGHT, capability_of(kind))];
    for (request, size, seed) in
        copies.into_iter().zip([FOUR, EIGHT]).zip([1, 2]).map(|((r, s), d)| (r, s, d))
    {
        let name = request.name.clone();
        let volume = created(fixture.node().create_volume(request.clone()));
        assert_eq!((volume.volume_id.as_str(), volume.capacity_bytes), (name.as_str(), size));
        assert_eq!(volume.content_source, request.volume_content_source);
        assert_eq!(created(fixture.node().create_volume(request)), volume);
        let reported = fixture.node().controller_get_volume(get(&name)).unwrap().volume.unwrap();
        assert_eq!(reported, volume);
        assert_holds(&publish_volume(&fixture, &name, kind), seed);
    }
    // Each copy is independent.
    write(&fixture.target("r"), 3);
    write(&fixture.target("c"), 4);
    assert_holds(&target, 2);
    for name in ["v", "r", "c"] {
        let stats = fixture.node().node_get_volume_stats(stats(name, &fixture.target(name))).unwrap();
        assert!(!stats.volume_condition.unwrap().abnormal);
        unpublish_volume(&fixture, name);
    }
    // A snapshot survives its volume, and a volume its snapshot.
    fixture.node().delete_volume(delete("v")).unwrap();
    assert_eq!(take(&fixture, "s", "v"), snapshot);
    assert_eq!(
        created(fixture.node().create_volume(from_snapshot("q", "s", FOUR, capability_of(kind))))
            .capacity_bytes,
        FOUR
    );
    for _ in 0..2 {
        fixture.node().delete_snapshot(delete_snapshot("s")).unwrap();
        assert_refused(fixture.node().get_snapshot(get_snapshot("s")), Code::NotFound, &["s"]);
    }
    for (name, seed) in [("q", 1), ("r", 3), ("c", 4)] {
        assert_holds(&publish_volume(&fixture, name, kind), seed);
        unpublish_volume(&fixture, name);
        fixture.node().delete_volume(delete(name)).unwrap();
    }
    fixture.finish();
}

#[rstest]
#[case::directory(VolumeKind::Filesystem)]
#[case::device(VolumeKind::Block)]
fn same_name_with_other_source_fails(#[case] kind: VolumeKind) {
    let fixture = Fixture::new();
    let node = fixture.node();
    let capability = || capability_of(kind);
    for volume in ["v", "w"] {
        node.create_volume(create(volume, FOUR, capability())).unwrap();
    }
    take(&fixture, "s", "v");
    take(&fixture, "t", "v");
    for _ in 0..2 {
        let refused = node.create_snapshot(create_snapshot("s", "w"));
        assert_refused(refused, Code::AlreadyExists, &["s", "volume v", "volume w"]);
    }
    let clone = created(node.create_volume(from_snapshot("c", "s", FOUR, capability())));
    let others = [
        create("c", FOUR, capability()),
        from_snapshot("c", "t", FOUR, capability()),
        from_volume("c", "v", FOUR, capability()),
        from_snapshot("v", "s", FOUR, capability()),
    ];
    for other in others {
        let name = other.name.clone();
        assert_refused(node.create_volume(other), Code::AlreadyExists, &[&name, "created"]);
    }
    // This holds after the snapshot was deleted, too.
    node.delete_snapshot(delete_snapshot("s")).unwrap();
    assert_eq!(created(node.create_volume(from_snapshot("c", "s", FOUR, capability()))), clone);
    assert_refused(
        node.create_volume(from_snapshot("d", "s", FOUR, capability())),
        Code::NotFound,
        &["volume_content_source", "s"],
    );
    let snapshot = node.create_snapshot(create_snapshot("n", "absent"));
    assert_refused(snapshot, Code::NotFound, &["source_volume_id", "absent"]);
    let copy = node.create_volume(from_volume("n", "absent", FOUR, capability()));
    assert_refused(copy, Code::NotFound, &["volume_content_source", "absent"]);
    fixture.finish();
}

#[test]
fn a_copy_with_incompatible_properties_is_refused() {
    let fixture = Fixture::new();
    let node = fixture.node();
    node.create_volume(create("v", FOUR, block())).unwrap();
    take(&fixture, "s", "v");
    let range = |required_bytes, limit_bytes| Some(wire::CapacityRange { required_bytes, limit_bytes });
    for source in [from_snapshot("c", "s", FOUR, block()), from_volume("c", "v", FOUR, block())] {
        let base = || source.clone();
        let with = |name: &str, value: &str| wire::CreateVolumeRequest {
            parameters: [(name.to_owned(), value.to_owned())].into(),
            ..base()
        };
        let other_kind =
            wire::CreateVolumeRequest { volume_capabilities: Vec::from_iter(mount(&[])), ..base() };
        let smaller = wire::CreateVolumeRequest { capacity_range: range(0, FOUR - 1), ..base() };
        let too_large = wire::CreateVolumeRequest { capacity_range: range(1 << 40, 0), ..base() };
        let elsewhere = wire::CreateVolumeRequest { accessibility_requirements: on("node-2"), ..base() };
        for (request, code, expected_text) in [
            (other_kind, Code::InvalidArgument, "Block"),
            (smaller, Code::OutOfRange, "limit"),
            (with("logicalBlockSize", "4096"), Code::InvalidArgument, "logicalBlockSize"),
            // Sharing blocks costs direct I/O.
            (with("directIO", "required"), Code::InvalidArgument, "directIO"),
            (elsewhere, Code::ResourceExhausted, "accessibility_requirements"),
            (too_large, Code::ResourceExhausted, "available"),
        ] {
            assert_refused(node.create_volume(request), code, &[expected_text]);
        }
    }
    assert_eq!(fixture.store.list().unwrap(), [id("v")]);
    fixture.finish();
}

/// csi-snapshotter gives a snapshot up only after an error that it takes as final, and RESOURCE_EXHAUSTED is none of these.
#[test]
fn snapshot_without_space_fails_finally() {
    let fixture = Fixture::new();
    fixture.node().create_volume(create("v", FOUR, block())).unwrap();
    let rest = |capacity| VolumeSpec::new(VolumeKind::Block, capacity);
    let largest = fixture.store.space().unwrap().largest_volume(&rest(Bytes(0)));
    fixture.store.create(&id("rest"), &rest(largest)).unwrap();
    let refused = fixture.node().create_snapshot(create_snapshot("s", "v"));
    assert_refused(refused, Code::OutOfRange, &["requested", "available"]);
    fixture.finish();
}

/// Returns the ids of the snapshots of a page.
fn snapshots(fixture: &Fixture, request: wire::ListSnapshotsRequest) -> Vec<String> {
    let page = fixture.node().list_snapshots(request).unwrap();
    page.entries.into_iter().map(|entry| entry.snapshot.unwrap().snapshot_id).collect()
}

#[test]
fn snapshots_are_listed_by_volume_and_id() {
    let fixture = Fixture::new();
    for volume in ["v", "w"] {
        fixture.node().create_volume(create(volume, FOUR, block())).unwrap();
    }
    let taken: Vec<wire::Snapshot> =
        (0..4).map(|n| take(&fixture, &format!("s-{n}"), if n % 2 == 0 { "v" } else { "w" })).collect();
    let all = fixture.node().list_snapshots(list_snapshots(0, "", "", "")).unwrap();
    assert_eq!(all.next_token, "");
    assert!(all.entries.iter().map(|entry| entry.snapshot.as_ref().unwrap()).eq(&taken));

    // The first snapshot of the first page is deleted before the second page is listed.
    let first = fixture.node().list_snapshots(list_snapshots(1, "", "w", "")).unwrap();
    assert_eq!(first.entries.len(), 1);
    fixture.node().delete_snapshot(delete_snapshot("s-1")).unwrap();
    assert_eq!(snapshots(&fixture, list_snapshots(1, &first.next_token, "w", "")), ["s-3"]);

    assert_eq!(snapshots(&fixture, list_snapshots(0, "", "v", "")), ["s-0", "s-2"]);
    assert_eq!(snapshots(&fixture, list_snapshots(0, "", "", "s-2")), ["s-2"]);
    for volume in ["w", "absent"] {
        assert_eq!(snapshots(&fixture, list_snapshots(0, "", volume, "s-2")), [""; 0]);
    }
    // The list of volumes contains no snapshots.
    assert_eq!(fixture.node().list_volumes(list(0, "")).unwrap().entries.len(), 2);
    fixture.finish();
}

/// The settings of the volume do not fit the disk, so no device could be attached.
#[test]
fn copy_that_cannot_attach_is_refused() {
    let fixture = Fixture::new();
    let parameters =
        [("directIO".to_owned(), "required".to_owned()), ("logicalBlockSize".to_owned(), "512".to_owned())];
    let request = wire::CreateVolumeRequest { parameters: parameters.into(), ..create("v", FOUR, block()) };
    fixture.node().create_volume(request).unwrap();
    let refused = fixture.node().create_snapshot(create_snapshot("s", "v"));
    assert_refused(refused, Code::FailedPrecondition, &["directIO preferred", "logicalBlockSize 4096"]);
    let refused = fixture.node().create_volume(from_volume("c", "v", FOUR, block()));
    assert_refused(refused, Code::InvalidArgument, &["directIO preferred", "logicalBlockSize 4096"]);
    assert_eq!(fixture.store.snapshots().unwrap(), []);
    fixture.finish();
}

#[test]
fn snapshot_on_another_node_is_refused() {
    let fixture = Fixture::new();
    let node = fixture.node();
    node.create_volume(create("v", FOUR, block())).unwrap();
    let request = |node: &str| wire::CreateSnapshotRequest {
        accessibility_requirements: on(node),
        ..create_snapshot("s", "v")
    };
    let field = ["accessibility_requirements"];
    assert_refused(node.create_snapshot(request("node-2")), Code::ResourceExhausted, &field);
    assert_eq!(fixture.store.snapshots().unwrap(), []);
    node.create_snapshot(request(NODE)).unwrap();
    assert_refused(node.create_snapshot(request("node-2")), Code::AlreadyExists, &field);
    fixture.finish();
}
