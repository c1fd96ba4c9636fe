//! Tests of the Controller service: creating, listing, expanding and deleting volumes.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;

use csi_wire::csi as wire;
use loopfs::Bytes;
use loopfs::volume_store::VolumeKind;
use rstest::rstest;
use tonic::{Code, Status};

use crate::fixture::{Fixture, MIB, id, read_from, write_to};
use crate::support::*;

const FOUR: i64 = 4 << 20;
const EIGHT: i64 = 8 << 20;

fn create_within(
    name: &str,
    (required_bytes, limit_bytes): (i64, i64),
    capability: Option<wire::VolumeCapability>,
) -> wire::CreateVolumeRequest {
    let capacity_range = Some(wire::CapacityRange { required_bytes, limit_bytes });
    wire::CreateVolumeRequest { capacity_range, ..create(name, 0, capability) }
}

fn create_with(
    name: &str,
    parameters: &[(&str, &str)],
    capability: Option<wire::VolumeCapability>,
) -> wire::CreateVolumeRequest {
    let parameters = parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    wire::CreateVolumeRequest { parameters, ..create(name, FOUR, capability) }
}

fn create_on(
    name: &str,
    node: &str,
    capability: Option<wire::VolumeCapability>,
) -> wire::CreateVolumeRequest {
    wire::CreateVolumeRequest { accessibility_requirements: on(node), ..create(name, FOUR, capability) }
}

/// Returns the names of the volumes in a list.
fn names(list: &wire::ListVolumesResponse) -> Vec<&str> {
    list.entries.iter().map(|entry| entry.volume.as_ref().unwrap().volume_id.as_str()).collect()
}

fn created(response: Result<wire::CreateVolumeResponse, Status>) -> wire::Volume {
    response.unwrap().volume.unwrap()
}

/// Returns the number of entries in the trash of the store.
fn trash(fixture: &Fixture) -> usize {
    fs::read_dir(fixture.directories.data.join("trash")).unwrap().count()
}

/// Writes a test content to a published volume.
fn write(target: &Path, kind: VolumeKind) {
    match kind {
        VolumeKind::Filesystem => fs::write(target.join("file"), b"kept").unwrap(),
        VolumeKind::Block => write_to(target, b"kept").unwrap(),
    }
}

fn read(target: &Path, kind: VolumeKind) -> Vec<u8> {
    match kind {
        VolumeKind::Filesystem => fs::read(target.join("file")).unwrap(),
        VolumeKind::Block => read_from(target, 4),
    }
}

/// The volume is created before the restart, and then published, expanded and deleted.
#[rstest]
#[case::directory(VolumeKind::Filesystem)]
#[case::device(VolumeKind::Block)]
fn volume_lifecycle_works_after_driver_restart(#[case] kind: VolumeKind) {
    let mut fixture = Fixture::new();
    let (target, staging) = (fixture.target("target"), fixture.target("staging"));
    let request = create("v", FOUR - 1, capability_of(kind));
    let volume = created(fixture.node().create_volume(request.clone()));
    assert_eq!((volume.volume_id.as_str(), volume.capacity_bytes), ("v", FOUR));
    assert_eq!(volume.accessible_topology, [topology(NODE)]);
    let uuid = (format!("{DRIVER}/filesystem-uuid"), fixture.store.filesystem_uuid().to_string());
    assert_eq!(volume.volume_context, [uuid].into());
    fixture.restart_driver();
    let node = fixture.node();
    assert_eq!(created(node.create_volume(request.clone())), volume);

    let volume_context = volume.volume_context.clone();
    let staged = wire::NodeStageVolumeRequest {
        volume_context: volume_context.clone(),
        ..stage("v", &staging, capability_of(kind))
    };
    node.node_stage_volume(staged).unwrap();
    let published =
        wire::NodePublishVolumeRequest { volume_context, ..publish("v", &target, capability_of(kind)) };
    node.node_publish_volume(published).unwrap();
    write(&target, kind);
    let status = node.controller_get_volume(get("v")).unwrap().status.unwrap();
    assert_eq!(status.published_node_ids, [NODE]);
    assert!(!status.volume_condition.unwrap().abnormal);

    for _ in 0..2 {
        let grown = node.controller_expand_volume(controller_expand("v", EIGHT, EIGHT)).unwrap();
        assert_eq!(grown.capacity_bytes, EIGHT);
        assert!(!grown.node_expansion_required, "the devices are refreshed");
    }
    assert_eq!(node.node_expand_volume(expand("v", &target, EIGHT, 0)).unwrap().capacity_bytes, EIGHT);
    assert_eq!(read(&target, kind), b"kept");
    // It still has the properties of the first request.
    assert_eq!(created(node.create_volume(request)).capacity_bytes, EIGHT);

    for _ in 0..2 {
        let refused = node.delete_volume(delete("v"));
        assert_refused(refused, Code::FailedPrecondition, &[target.to_str().unwrap(), "unpublish"]);
    }
    assert_eq!(read(&target, kind), b"kept");
    node.node_unpublish_volume(unpublish("v", &target)).unwrap();
    node.node_unstage_volume(unstage("v", &staging)).unwrap();
    for _ in 0..2 {
        node.delete_volume(delete("v")).unwrap();
        assert_refused(node.controller_get_volume(get("v")), Code::NotFound, &["v"]);
        assert_eq!(names(&node.list_volumes(list(0, "")).unwrap()), [""; 0]);
    }
    fixture.finish();
}

#[test]
fn trash_of_earlier_driver_is_freed() {
    let mut fixture = Fixture::without_driver();
    let before = fixture.projects();
    fixture.volume("old", VolumeKind::Filesystem);
    assert!(fixture.store.delete(&id("old")).unwrap());
    fixture.start_driver();
    // The driver releases the project after it has removed the files.
    wait_until("the trash is empty", || trash(&fixture) == 0 && fixture.projects() == before);
    fixture.finish();
}

#[test]
fn same_name_with_other_properties_fails() {
    let fixture = Fixture::new();
    let volume = created(fixture.node().create_volume(create("v", FOUR, mount(&[]))));
    for (other, expected_text) in [
        (create("v", FOUR, block()), "Block"),
        (create("v", FOUR + 1, mount(&[])), "4 MiB"),
        (create_within("v", (0, FOUR - 1), mount(&[])), "at most"),
        (create_with("v", &[("bytesPerInode", "4096")], mount(&[])), "4096"),
        (create_on("v", "node-2", mount(&[])), "on others"),
    ] {
        let refused = fixture.node().create_volume(other);
        assert_refused(refused, Code::AlreadyExists, &["v", expected_text]);
    }
    let compatible = [
        create_within("v", (0, 0), mount(&[])),
        create_within("v", (1, 0), mount(&["ro"])),
        create_within("v", (FOUR, FOUR), mount(&[])),
        create_with("v", &[("bytesPerInode", "16384")], mount(&[])),
        create_on("v", NODE, mount(&[])),
    ];
    for request in compatible {
        assert_eq!(created(fixture.node().create_volume(request)), volume);
    }
    assert_eq!(fixture.store.list().unwrap(), [id("v")]);
    fixture.finish();
}

/// The device was not unstaged before the driver was restarted.
#[test]
fn deletion_detaches_a_staged_device() {
    let mut fixture = Fixture::new();
    let staging = fixture.target("staging");
    fixture.node().create_volume(create("v", FOUR, block())).unwrap();
    fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    assert_eq!(fixture.devices("v").len(), 1);
    fixture.restart_driver();
    fixture.node().delete_volume(delete("v")).unwrap();
    fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    fixture.finish();
}

#[test]
fn list_continues_despite_concurrent_changes() {
    let fixture = Fixture::new();
    for name in ["b", "d", "f", "h"] {
        fixture.node().create_volume(create(name, FOUR, mount(&[]))).unwrap();
    }
    let page = |token: &str| fixture.node().list_volumes(list(2, token)).unwrap();
    let first = page("");
    assert_eq!((names(&first), first.next_token.as_str()), (vec!["b", "d"], "after:d"));

    // The last volume of the page is deleted; one volume is created before it, and one after it.
    fixture.node().delete_volume(delete("d")).unwrap();
    fixture.node().create_volume(create("c", FOUR, mount(&[]))).unwrap();
    fixture.node().create_volume(create("e", FOUR, mount(&[]))).unwrap();
    let second = page(&first.next_token);
    assert_eq!(names(&second), ["e", "f"]);
    let rest = fixture.node().list_volumes(list(0, &second.next_token)).unwrap();
    assert_eq!((names(&rest), rest.next_token.as_str()), (vec!["h"], ""));

    let whole = fixture.node().list_volumes(list(0, "")).unwrap();
    assert_eq!((names(&whole), whole.next_token.as_str()), (vec!["b", "c", "e", "f", "h"], ""));
    let exact = fixture.node().list_volumes(list(5, "")).unwrap();
    assert_eq!((exact.entries.len(), exact.next_token.as_str()), (5, ""));
    assert_eq!(names(&page("after:h")), [""; 0]);
    fixture.finish();
}

#[test]
fn list_has_nodes_and_conditions() {
    let fixture = Fixture::new();
    let node = fixture.node();
    let (target, device) = (fixture.target("target"), fixture.target("device"));
    node.create_volume(create("directory", FOUR, mount(&[]))).unwrap();
    node.create_volume(create("device", FOUR, block())).unwrap();
    node.create_volume(create("idle", FOUR, block())).unwrap();
    node.node_publish_volume(publish("directory", &target, mount(&[]))).unwrap();
    node.node_publish_volume(publish("device", &device, block())).unwrap();
    // The owner of a directory can remove it from its project, and so from its limit.
    loopfs::project_quota::assign_project(
        File::open(&target).unwrap().as_fd(),
        loopfs::project_quota::ProjectId::new(77).unwrap(),
    )
    .unwrap();
    let foreign = fixture.directories.data.join("volumes/foreign");
    fs::create_dir(&foreign).unwrap();

    let listed = node.list_volumes(list(0, "")).unwrap();
    let reported: Vec<_> = listed
        .entries
        .iter()
        .map(|entry| {
            let (volume, status) = (entry.volume.as_ref().unwrap(), entry.status.as_ref().unwrap());
            let published = !status.published_node_ids.is_empty();
            let abnormal = status.volume_condition.as_ref().unwrap().abnormal;
            (volume.volume_id.as_str(), volume.capacity_bytes, published, abnormal)
        })
        .collect();
    assert_eq!(
        reported,
        [
            ("device", FOUR, true, false),
            ("directory", FOUR, true, true),
            ("foreign", 0, false, true),
            ("idle", FOUR, false, false),
        ]
    );
    for (volume, expected_text) in [("directory", "77"), ("foreign", "did not create it")] {
        let condition = node.condition(volume);
        assert!(condition.message.contains(expected_text), "{condition:?}");
    }
    let abnormal = node.controller_list_volume_health(Default::default()).unwrap();
    let reported: Vec<_> = abnormal
        .entries
        .iter()
        .map(|entry| (entry.volume_id.as_str(), entry.health_statuses[0].status()))
        .collect();
    let (degraded, lost) = (wire::VolumeHealthErrorType::Degraded, wire::VolumeHealthErrorType::Inaccessible);
    assert_eq!(reported, [("directory", degraded), ("foreign", lost)]);
    for (volume, troubles) in [("directory", 1), ("device", 0)] {
        let on_node = node.node_get_volume_health(health_on_node(volume)).unwrap().volume_health.unwrap();
        let health = node.controller_get_volume_health(health(volume)).unwrap().volume_health.unwrap();
        assert_eq!((on_node.health_statuses.len(), &on_node), (troubles, &health));
    }
    assert_eq!(node.node_get_storage_health(Default::default()).unwrap().backend_health, []);
    fs::remove_dir(&foreign).unwrap();
    node.node_unpublish_volume(unpublish("directory", &target)).unwrap();
    node.node_unpublish_volume(unpublish("device", &device)).unwrap();
    fixture.finish();
}

#[test]
fn capacity_equals_largest_creatable_volume() {
    let fixture = Fixture::new();
    let node = fixture.node();
    let capacity = node.get_capacity(Default::default()).unwrap();
    assert!(capacity.available_capacity > 64 * FOUR, "{}", capacity.available_capacity);
    // The inodes of a Filesystem volume are an eighth of its size.
    let maximum = capacity.maximum_volume_size.unwrap();
    let least = capacity.available_capacity / 9 * 8 - FOUR;
    assert!((least..=capacity.available_capacity).contains(&maximum), "{capacity:?}");
    assert_eq!(capacity.minimum_volume_size, Some(4096));

    // The tolerance is for the metadata of the file system.
    let (too_much, enough) = (capacity.available_capacity + FOUR, maximum - FOUR);
    for capability in [mount(&[]), block()] {
        let refused = node.create_volume(create("v", too_much, capability));
        assert_refused(refused, Code::ResourceExhausted, &["requested", "available"]);
    }
    assert_eq!(fixture.store.list().unwrap(), []);

    let largest = created(node.create_volume(create("v", enough, mount(&[]))));
    assert_eq!(largest.capacity_bytes, enough);
    let left = node.get_capacity(Default::default()).unwrap();
    assert!(left.available_capacity <= 2 * FOUR, "{}", left.available_capacity);
    // The store reports the same capacity to the provisioner and other users of the store.
    assert_eq!(
        fixture.store.space().unwrap().available.0 / 4096 * 4096,
        u64::try_from(left.available_capacity).unwrap()
    );
    // For an existing volume the error is final, and the user can request less.
    let refused = node.controller_expand_volume(controller_expand("v", 2 * capacity.available_capacity, 0));
    assert_refused(refused, Code::OutOfRange, &["requested", "available"]);
    fixture.finish();
}

/// Repeated beside volumes whose sizes leave different remainders.
#[test]
fn volume_of_maximum_size_is_created() {
    let fixture = Fixture::new();
    for beside in [0, 1, 4093] {
        if beside > 0 {
            let beside = create_within(&format!("beside-{beside}"), (4096 * beside, 0), mount(&[]));
            fixture.node().create_volume(beside).unwrap();
        }
        for provisioning in ["thick", "thin"] {
            create_largest(&fixture, &[VolumeKind::Filesystem], provisioning);
            create_largest(&fixture, &[VolumeKind::Block], provisioning);
            create_largest(&fixture, &[], provisioning);
        }
    }
    fixture.finish();
}

/// Queries the maximum size of volumes of one kind or of all, and creates and deletes such a volume.
fn create_largest(fixture: &Fixture, requested: &[VolumeKind], provisioning: &str) {
    let node = fixture.node();
    let parameters = || [("provisioning".to_owned(), provisioning.to_owned())].into();
    let request = wire::GetCapacityRequest {
        volume_capabilities: requested.iter().flat_map(|kind| capability_of(*kind)).collect(),
        parameters: parameters(),
        ..Default::default()
    };
    let capacity = node.get_capacity(request).unwrap();
    let maximum = capacity.maximum_volume_size.unwrap();
    // The maximum is not far below the free space, either. The inodes of a Filesystem volume are an eighth of its size.
    let least = if requested == [VolumeKind::Block] { 98 } else { 87 };
    assert!(maximum > capacity.available_capacity / 100 * least, "{capacity:?}");
    let all = [VolumeKind::Filesystem, VolumeKind::Block];
    for kind in if requested.is_empty() { &all[..] } else { requested } {
        let request = wire::CreateVolumeRequest {
            parameters: parameters(),
            ..create_within("largest", (maximum, maximum), capability_of(*kind))
        };
        assert_eq!(created(node.create_volume(request)).capacity_bytes, maximum);
        assert!(fixture.store.delete(&id("largest")).unwrap());
        fixture.store.empty_trash().unwrap();
        // The driver empties the trash too, and may release the reservation after this process has returned.
        // The tolerance is for the metadata of the file system.
        wait_for_ok(|| match node.get_capacity(Default::default()).unwrap().available_capacity {
            free if free >= capacity.available_capacity - FOUR => Ok(()),
            free => Err(format!("{free} of {capacity:?} available")),
        });
    }
}

#[test]
fn the_capacity_is_of_this_node() {
    let fixture = Fixture::new();
    let capacity = |node: &str| {
        let request =
            wire::GetCapacityRequest { accessible_topology: Some(topology(node)), ..Default::default() };
        fixture.node().get_capacity(request).unwrap().available_capacity
    };
    assert_eq!((capacity(NODE) > 0, capacity("node-2")), (true, 0));
    let elsewhere = fixture.node().create_volume(create_on("v", "node-2", block()));
    assert_refused(elsewhere, Code::ResourceExhausted, &["accessibility_requirements"]);
    fixture.node().create_volume(create_on("v", NODE, block())).unwrap();
    assert_eq!(fixture.store.list().unwrap(), [id("v")]);
    fixture.finish();
}

#[test]
fn volume_expands_up_to_the_limit() {
    let fixture = Fixture::new();
    let node = fixture.node();
    node.create_volume(create("v", FOUR, block())).unwrap();
    assert_refused(
        node.controller_expand_volume(controller_expand("absent", FOUR, 0)),
        Code::NotFound,
        &["absent"],
    );
    assert_refused(node.controller_expand_volume(controller_expand("v", i64::MAX, 0)), Code::OutOfRange, &[]);
    assert_refused(
        node.controller_expand_volume(controller_expand("v", 0, FOUR - 1)),
        Code::OutOfRange,
        &["limit"],
    );
    assert_refused(
        node.controller_expand_volume(controller_expand("v", FOUR + 1, FOUR + 2)),
        Code::OutOfRange,
        &["limit"],
    );
    let as_mount = wire::ControllerExpandVolumeRequest {
        volume_capability: mount(&[]),
        ..controller_expand("v", EIGHT, 0)
    };
    assert_refused(node.controller_expand_volume(as_mount), Code::InvalidArgument, &["mount", "Block"]);
    assert_eq!(fixture.store.volume(&id("v")).unwrap().capacity(), Bytes(4 * MIB));
    // The volume keeps its size, because at least this size was requested.
    assert_eq!(node.controller_expand_volume(controller_expand("v", 1, 0)).unwrap().capacity_bytes, FOUR);
    assert_eq!(node.controller_expand_volume(controller_expand("v", 0, EIGHT)).unwrap().capacity_bytes, FOUR);
    assert_eq!(
        node.controller_expand_volume(controller_expand("v", FOUR + 1, 0)).unwrap().capacity_bytes,
        FOUR + 4096
    );
    fixture.finish();
}

#[test]
fn validation_confirms_only_actual_properties() {
    let fixture = Fixture::new();
    let node = fixture.node();
    let volume = created(node.create_volume(create("v", FOUR, mount(&[]))));
    let requested = |parameters: &[(&str, &str)], context: std::collections::HashMap<String, String>| {
        let parameters =
            parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let request = wire::ValidateVolumeCapabilitiesRequest {
            parameters,
            volume_context: context,
            ..validate("v", mount(&[]))
        };
        node.validate_volume_capabilities(request).unwrap()
    };
    let confirmed =
        requested(&[("bytesPerInode", "16384")], volume.volume_context.clone()).confirmed.unwrap();
    assert_eq!(confirmed.volume_capabilities, Vec::from_iter(mount(&[])));
    assert_eq!(confirmed.volume_context, volume.volume_context);
    assert_eq!(confirmed.parameters.len(), 1);

    let key = format!("{DRIVER}/filesystem-uuid");
    let foreign = requested(&[], [(key, "00000000-1111-4222-8333-444444444444".to_owned())].into());
    let ratio = requested(&[("bytesPerInode", "4096")], Default::default());
    let kind = node.validate_volume_capabilities(validate("v", block())).unwrap();
    let several = capability(
        block().unwrap().access_type.unwrap(),
        wire::volume_capability::access_mode::Mode::MultiNodeMultiWriter,
    );
    let mode = node.validate_volume_capabilities(validate("v", several)).unwrap();
    for (refused, expected_text) in
        [(foreign, "file system"), (ratio, "16384"), (kind, "Filesystem"), (mode, "MULTI_NODE")]
    {
        assert_eq!(refused.confirmed, None);
        assert!(refused.message.contains(expected_text), "{}", refused.message);
    }
    let absent = node.validate_volume_capabilities(validate("absent", mount(&[])));
    assert_refused(absent, Code::NotFound, &["absent"]);
    fixture.finish();
}
