//! The RPCs, and the states of the node that they need and establish.

use std::fs::File;

use csi_wire::csi as wire;
use loopfs::Bytes;
use loopfs::volume_store::{SnapshotId, VolumeKind};
use tonic::Status;

use super::{CallResult, MalformedName, Rpc, Subject};
use crate::fixture::{Fixture, MIB, device_size, id};
use crate::support::*;

macro_rules! rpc {
    ($name:literal, $prepare:expr, $call:expr, $is_done:expr, $malformed_name:ident) => {
        Rpc {
            name: $name,
            prepare: $prepare,
            call: $call,
            is_done: $is_done,
            malformed_name: MalformedName::$malformed_name,
        }
    };
}

pub(super) const RPCS: &[Rpc] = &[
    rpc!(
        "GetPluginInfo",
        nothing,
        |node, _| result_of(node.get_plugin_info(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "GetPluginCapabilities",
        nothing,
        |node, _| result_of(node.get_plugin_capabilities(Default::default())),
        always,
        TakesNoName
    ),
    rpc!("Probe", nothing, |node, _| result_of(node.probe(wire::ProbeRequest {})), always, TakesNoName),
    rpc!(
        "CreateVolume",
        nothing,
        |node, subject| result_of(node.create_volume(create(&subject.name, 1 << 20, block()))),
        is_stored,
        Accepted
    ),
    rpc!(
        "CreateVolume (clone)",
        |fixture, _, subject| fixture.volume(&source(subject), VolumeKind::Block),
        |node, subject| result_of(node.create_volume(from_volume(
            &subject.name,
            &source(subject),
            1 << 20,
            block()
        ))),
        is_stored,
        Refused
    ),
    rpc!(
        "DeleteVolume",
        device,
        |node, subject| result_of(node.delete_volume(delete(&subject.name))),
        is_deleted,
        CountsAsDeleted
    ),
    rpc!(
        "ControllerExpandVolume",
        device,
        |node, subject| result_of(node.controller_expand_volume(controller_expand(
            &subject.name,
            2 << 20,
            0
        ))),
        |fixture, subject| fixture.store.volume(&id(&subject.name)).unwrap().capacity() == Bytes(2 * MIB),
        Refused
    ),
    rpc!(
        "ControllerGetVolume",
        device,
        |node, subject| result_of(node.controller_get_volume(get(&subject.name))),
        is_stored,
        Refused
    ),
    rpc!(
        "ControllerGetVolumeHealth",
        device,
        |node, subject| {
            let request = wire::ControllerGetVolumeHealthRequest {
                volume_id: subject.name.clone(),
                ..Default::default()
            };
            result_of(node.controller_get_volume_health(request))
        },
        is_stored,
        Refused
    ),
    rpc!(
        "ControllerListVolumeHealth",
        nothing,
        |node, _| result_of(node.controller_list_volume_health(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "ValidateVolumeCapabilities",
        device,
        |node, subject| result_of(node.validate_volume_capabilities(validate(&subject.name, block()))),
        is_stored,
        Refused
    ),
    rpc!("ListVolumes", device, |node, _| result_of(node.list_volumes(list(0, ""))), is_stored, TakesNoName),
    rpc!(
        "GetCapacity",
        nothing,
        // The exact value changes while space is freed in the background.
        |node, _| result_of(
            node.get_capacity(Default::default()).map(|result| result.available_capacity > 0)
        ),
        always,
        TakesNoName
    ),
    rpc!(
        "ControllerGetCapabilities",
        nothing,
        |node, _| result_of(node.controller_get_capabilities(wire::ControllerGetCapabilitiesRequest {})),
        always,
        TakesNoName
    ),
    rpc!(
        "CreateSnapshot",
        device,
        |node, subject| result_of(node.create_snapshot(create_snapshot(&subject.name, &subject.name))),
        has_snapshot,
        Refused
    ),
    rpc!(
        "DeleteSnapshot",
        snapshot,
        |node, subject| result_of(node.delete_snapshot(delete_snapshot(&subject.name))),
        |fixture, subject| !has_snapshot(fixture, subject),
        CountsAsDeleted
    ),
    rpc!(
        "GetSnapshot",
        snapshot,
        |node, subject| result_of(node.get_snapshot(get_snapshot(&subject.name))),
        has_snapshot,
        Refused
    ),
    rpc!(
        "ListSnapshots",
        snapshot,
        |node, subject| result_of(node.list_snapshots(list_snapshots(0, "", &subject.name, ""))),
        has_snapshot,
        CountsAsDeleted
    ),
    rpc!(
        "NodeGetInfo",
        nothing,
        |node, _| result_of(node.node_get_info(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "NodeGetCapabilities",
        nothing,
        |node, _| result_of(node.node_get_capabilities(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "NodeStageVolume",
        device,
        |node, subject| result_of(node.node_stage_volume(stage(&subject.name, &subject.staging, block()))),
        is_attached,
        Refused
    ),
    rpc!(
        "NodePublishVolume",
        device,
        |node, subject| result_of(node.node_publish_volume(publish(&subject.name, &subject.target, block()))),
        |fixture, subject| is_attached(fixture, subject) && is_published(fixture, subject),
        Refused
    ),
    rpc!(
        "NodePublishVolume (mount)",
        directory,
        |node, subject| result_of(node.node_publish_volume(publish(
            &subject.name,
            &subject.target,
            mount(&["nodev"])
        ))),
        is_published,
        Refused
    ),
    rpc!(
        "NodeGetVolumeStats",
        published,
        |node, subject| result_of(node.node_get_volume_stats(stats(&subject.name, &subject.target))),
        is_published,
        Refused
    ),
    rpc!(
        "NodeGetVolumeHealth",
        published,
        |node, subject| {
            let target = subject.target.to_str().unwrap_or_default().to_owned();
            let request = wire::NodeGetVolumeHealthRequest {
                volume_id: subject.name.clone(),
                volume_publish_path: target,
                ..Default::default()
            };
            result_of(node.node_get_volume_health(request))
        },
        is_published,
        Refused
    ),
    rpc!(
        "NodeGetStorageHealth",
        nothing,
        |node, _| result_of(node.node_get_storage_health(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "NodeExpandVolume",
        expanded,
        |node, subject| result_of(node.node_expand_volume(expand(
            &subject.name,
            &subject.target,
            2 << 20,
            0
        ))),
        |_, subject| device_size(&File::open(&subject.target).unwrap()) == 2 * MIB,
        Refused
    ),
    rpc!(
        "NodeUnpublishVolume",
        published,
        |node, subject| result_of(node.node_unpublish_volume(unpublish(&subject.name, &subject.target))),
        |fixture, subject| !is_attached(fixture, subject)
            && fixture.mounts_at(&subject.target) == 0
            && !subject.target.exists(),
        Refused
    ),
    rpc!(
        "NodeUnstageVolume",
        staged,
        |node, subject| result_of(node.node_unstage_volume(unstage(&subject.name, &subject.staging))),
        |fixture, subject| !is_attached(fixture, subject),
        Refused
    ),
];

fn result_of<T: std::fmt::Debug>(result: Result<T, Status>) -> CallResult {
    result.map(|result| format!("{result:?}"))
}

fn nothing(_: &Fixture, _: &Client, _: &Subject) {}

fn device(fixture: &Fixture, _: &Client, subject: &Subject) {
    fixture.volume(&subject.name, VolumeKind::Block);
}

fn directory(fixture: &Fixture, _: &Client, subject: &Subject) {
    fixture.volume(&subject.name, VolumeKind::Filesystem);
}

fn source(subject: &Subject) -> String {
    format!("{}-source", subject.name)
}

fn snapshot(fixture: &Fixture, _: &Client, subject: &Subject) {
    fixture.volume(&subject.name, VolumeKind::Block);
    fixture.store.create_snapshot(&id(&subject.name), &SnapshotId::parse(&subject.name).unwrap()).unwrap();
}

fn staged(fixture: &Fixture, node: &Client, subject: &Subject) {
    device(fixture, node, subject);
    node.node_stage_volume(stage(&subject.name, &subject.staging, block())).unwrap();
}

fn published(fixture: &Fixture, node: &Client, subject: &Subject) {
    device(fixture, node, subject);
    node.node_publish_volume(publish(&subject.name, &subject.target, block())).unwrap();
}

fn expanded(fixture: &Fixture, node: &Client, subject: &Subject) {
    published(fixture, node, subject);
    fixture.store.expand(&id(&subject.name), Bytes(2 * MIB)).unwrap();
}

fn always(_: &Fixture, _: &Subject) -> bool {
    true
}

fn is_stored(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.store.list().unwrap().contains(&id(&subject.name))
}

fn is_deleted(fixture: &Fixture, subject: &Subject) -> bool {
    !is_stored(fixture, subject)
}

fn has_snapshot(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.store.snapshots().unwrap().iter().any(|snapshot| snapshot.as_str() == subject.name)
}

fn is_attached(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.devices(&subject.name).len() == 1
}

fn is_published(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.mounts_at(&subject.target) == 1
}
