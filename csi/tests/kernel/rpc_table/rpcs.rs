//! The RPCs, and the states of the node that they need and establish.

use std::fs::File;

use csi_wire::csi as wire;
use loopfs::Bytes;
use loopfs::volume_store::{SnapshotId, VolumeKind};
use tonic::Status;

use super::{Rpc, Subject};
use crate::fixture::{Fixture, MIB, device_size, id};
use crate::support::*;

fn rpc<T: std::fmt::Debug>(
    name: &'static str,
    prepare: fn(&Fixture, &Client, &Subject),
    is_done: fn(&Fixture, &Subject) -> bool,
    call: impl Fn(&Client, &Subject) -> Result<T, Status> + Sync + 'static,
) -> Rpc {
    let call =
        move |node: &Client, subject: &Subject| call(node, subject).map(|response| format!("{response:?}"));
    Rpc { name, prepare, is_done, call: Box::new(call) }
}

pub(super) fn rpcs() -> Vec<Rpc> {
    [identity(), controller(), snapshots(), node()].into_iter().flatten().collect()
}

fn identity() -> Vec<Rpc> {
    vec![
        rpc("GetPluginInfo", nothing, always, |node, _| node.get_plugin_info(Default::default())),
        rpc("GetPluginCapabilities", nothing, always, |node, _| {
            node.get_plugin_capabilities(Default::default())
        }),
        rpc("Probe", nothing, always, |node, _| node.probe(Default::default())),
    ]
}

fn controller() -> Vec<Rpc> {
    vec![
        rpc("CreateVolume", nothing, is_stored, |node, subject| {
            node.create_volume(create(&subject.name, 1 << 20, block()))
        }),
        rpc("CreateVolume (mount)", nothing, is_stored, |node, subject| {
            node.create_volume(create(&subject.name, 1 << 20, mount(&[])))
        }),
        rpc("CreateVolume (clone)", clone_source, is_stored, |node, subject| {
            node.create_volume(from_volume(&subject.name, &source(subject), 1 << 20, block()))
        }),
        rpc("DeleteVolume", device, is_deleted, |node, subject| node.delete_volume(delete(&subject.name))),
        rpc("ControllerExpandVolume", device, is_expanded, |node, subject| {
            node.controller_expand_volume(controller_expand(&subject.name, 2 << 20, 0))
        }),
        rpc("ControllerGetVolume", device, is_stored, |node, subject| {
            node.controller_get_volume(get(&subject.name))
        }),
        rpc("ControllerGetVolumeHealth", device, is_stored, |node, subject| {
            node.controller_get_volume_health(health(&subject.name))
        }),
        rpc("ControllerListVolumeHealth", nothing, always, |node, _| {
            node.controller_list_volume_health(Default::default())
        }),
        rpc("ValidateVolumeCapabilities", device, is_stored, |node, subject| {
            node.validate_volume_capabilities(validate(&subject.name, block()))
        }),
        rpc("ListVolumes", device, is_stored, |node, _| node.list_volumes(list(0, ""))),
        // The exact value changes while space is freed in the background.
        rpc("GetCapacity", nothing, always, |node, _| {
            node.get_capacity(Default::default()).map(|result| result.available_capacity > 0)
        }),
        rpc("ControllerGetCapabilities", nothing, always, |node, _| {
            node.controller_get_capabilities(Default::default())
        }),
    ]
}

fn snapshots() -> Vec<Rpc> {
    vec![
        rpc("CreateSnapshot", device, has_snapshot, |node, subject| {
            node.create_snapshot(create_snapshot(&subject.name, &subject.name))
        }),
        rpc("DeleteSnapshot", snapshot, has_no_snapshot, |node, subject| {
            node.delete_snapshot(delete_snapshot(&subject.name))
        }),
        rpc("GetSnapshot", snapshot, has_snapshot, |node, subject| {
            node.get_snapshot(get_snapshot(&subject.name))
        }),
        rpc("ListSnapshots", snapshot, has_snapshot, |node, subject| {
            node.list_snapshots(list_snapshots(0, "", &subject.name, ""))
        }),
    ]
}

fn node() -> Vec<Rpc> {
    vec![
        rpc("NodeGetInfo", nothing, always, |node, _| node.node_get_info(Default::default())),
        rpc("NodeGetCapabilities", nothing, always, |node, _| node.node_get_capabilities(Default::default())),
        rpc("NodeStageVolume", device, is_attached, |node, subject| {
            node.node_stage_volume(stage(&subject.name, &subject.staging, block()))
        }),
        rpc("NodePublishVolume", device, is_device_published, |node, subject| {
            node.node_publish_volume(publish(&subject.name, &subject.target, block()))
        }),
        rpc("NodePublishVolume (mount)", directory, is_published, |node, subject| {
            node.node_publish_volume(publish(&subject.name, &subject.target, mount(&["nodev"])))
        }),
        rpc("NodeGetVolumeStats", published, is_published, |node, subject| {
            node.node_get_volume_stats(stats(&subject.name, &subject.target))
        }),
        rpc("NodeGetVolumeHealth", published, is_published, |node, subject| {
            let volume_publish_path = subject.target.to_str().unwrap_or_default().to_owned();
            let request =
                wire::NodeGetVolumeHealthRequest { volume_publish_path, ..health_on_node(&subject.name) };
            node.node_get_volume_health(request)
        }),
        rpc("NodeGetStorageHealth", nothing, always, |node, _| {
            node.node_get_storage_health(Default::default())
        }),
        rpc("NodeExpandVolume", expanded, has_new_size, |node, subject| {
            node.node_expand_volume(expand(&subject.name, &subject.target, 2 << 20, 0))
        }),
        rpc("NodeUnpublishVolume", published, is_unpublished, |node, subject| {
            node.node_unpublish_volume(unpublish(&subject.name, &subject.target))
        }),
        rpc("NodeUnstageVolume", staged, is_detached, |node, subject| {
            node.node_unstage_volume(unstage(&subject.name, &subject.staging))
        }),
    ]
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

fn clone_source(fixture: &Fixture, _: &Client, subject: &Subject) {
    fixture.volume(&source(subject), VolumeKind::Block);
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

fn is_expanded(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.store.volume(&id(&subject.name)).unwrap().capacity() == Bytes(2 * MIB)
}

fn is_deleted(fixture: &Fixture, subject: &Subject) -> bool {
    !is_stored(fixture, subject)
}

fn has_snapshot(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.store.snapshots().unwrap().iter().any(|snapshot| snapshot.as_str() == subject.name)
}

fn has_no_snapshot(fixture: &Fixture, subject: &Subject) -> bool {
    !has_snapshot(fixture, subject)
}

fn is_attached(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.devices(&subject.name).len() == 1
}

fn is_published(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.mounts_at(&subject.target) == 1
}

fn is_detached(fixture: &Fixture, subject: &Subject) -> bool {
    !is_attached(fixture, subject)
}

fn is_device_published(fixture: &Fixture, subject: &Subject) -> bool {
    is_attached(fixture, subject) && is_published(fixture, subject)
}

fn has_new_size(_: &Fixture, subject: &Subject) -> bool {
    device_size(&File::open(&subject.target).unwrap()) == 2 * MIB
}

fn is_unpublished(fixture: &Fixture, subject: &Subject) -> bool {
    is_detached(fixture, subject) && fixture.mounts_at(&subject.target) == 0 && !subject.target.exists()
}
