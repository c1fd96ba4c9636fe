//! Property tests: the services accept or refuse any message without a panic.

use csi_wire::csi as wire;
use csi_wire::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use csi_wire::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use loopfs::volume_store::{SnapshotId, VolumeId, VolumeSpec};
use proptest::collection::{hash_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use prost::Message;

use super::snapshots::Filter;
use crate::request::tests::reader;
use crate::request::{self, CapacityRange, ListRequest, deleted_id, existing_id};

/// Arbitrary texts, and texts that are often mishandled.
fn text() -> impl Strategy<Value = String> {
    let setting = || select(VolumeSpec::SETTINGS);
    let value = setting().prop_flat_map(|setting| select(setting.allowed.split(' ').collect::<Vec<_>>()));
    prop_oneof![
        4 => "\\PC{0,40}",
        2 => "(/var/lib/kubelet)?[a./ \\-\\x00-\\x1f]{0,40}",
        2 => "[a-zA-Z0-9._\\-]{1,140}",
        1 => "after:[a-z./]{0,8}",
        1 => Just("n".repeat(4096)),
        1 => setting().prop_map(|setting| setting.name.to_owned()),
        1 => value.prop_map(str::to_owned),
        1 => Just("csi.loopfs.dev/filesystem-uuid".to_owned()),
        1 => Just(String::new()),
    ]
}

fn number() -> impl Strategy<Value = i64> {
    prop_oneof![any::<i64>(), -2i64..5000, Just(i64::MIN), Just(i64::MAX)]
}

fn capability() -> impl Strategy<Value = wire::VolumeCapability> {
    let mount = (text(), vec(text(), 0..3), text()).prop_map(|(fs_type, mount_flags, volume_mount_group)| {
        AccessType::Mount(MountVolume { fs_type, mount_flags, volume_mount_group })
    });
    let access_type = prop_oneof![
        Just(AccessType::Block(BlockVolume {})),
        Just(AccessType::Mount(MountVolume::default())),
        mount
    ];
    (option::of(access_type), option::of(-1..10)).prop_map(|(access_type, mode)| wire::VolumeCapability {
        access_type,
        access_mode: mode.map(|mode| AccessMode { mode }),
    })
}

fn range() -> impl Strategy<Value = wire::CapacityRange> {
    (number(), number())
        .prop_map(|(required_bytes, limit_bytes)| wire::CapacityRange { required_bytes, limit_bytes })
}

fn source() -> impl Strategy<Value = wire::VolumeContentSource> {
    let named = prop_oneof![
        text().prop_map(|volume_id| Type::Volume(VolumeSource { volume_id })),
        text().prop_map(|snapshot_id| Type::Snapshot(SnapshotSource { snapshot_id })),
    ];
    option::of(named).prop_map(|r#type| wire::VolumeContentSource { r#type })
}

fn topology() -> impl Strategy<Value = wire::Topology> {
    hash_map(text(), text(), 0..3).prop_map(|segments| wire::Topology { segments })
}

/// Reads the bytes as each of the request messages.
fn read_all(bytes: &[u8]) {
    fn read<M: Message + Default>(bytes: &[u8], read: impl FnOnce(M)) {
        if let Ok(message) = M::decode(bytes) {
            read(message);
        }
    }
    let reader = reader();
    read(bytes, |message| drop(reader.stage(message)));
    read(bytes, |message| drop(reader.publish(message)));
    read(bytes, |message: wire::NodeExpandVolumeRequest| {
        drop(reader.volume_at(&message.volume_id, &message.volume_path));
        drop(CapacityRange::parse(message.capacity_range));
        drop(request::kind_of(message.volume_capability));
    });
    read(bytes, |message| drop(reader.create(message)));
    read(bytes, |message: wire::DeleteVolumeRequest| {
        drop(deleted_id::<VolumeId>("volume_id", &message.volume_id));
    });
    read(bytes, |message| drop(reader.validate(message)));
    read(bytes, |message: wire::ListVolumesRequest| {
        drop(ListRequest::<VolumeId>::parse(message.max_entries, &message.starting_token));
    });
    read(bytes, |message| drop(reader.create_snapshot(message)));
    read(bytes, |message: wire::GetSnapshotRequest| {
        drop(existing_id::<SnapshotId>("snapshot_id", "snapshot", &message.snapshot_id));
    });
    read(bytes, |message: wire::ListSnapshotsRequest| {
        drop(Filter::parse(&message.snapshot_id, &message.source_volume_id));
        drop(ListRequest::<SnapshotId>::parse(message.max_entries, &message.starting_token));
    });
    read(bytes, |message| drop(reader.capacity(message)));
    read(bytes, |message| drop(reader.controller_expand(message)));
    read(bytes, |message: wire::ControllerGetVolumeRequest| drop(request::volume_id(&message.volume_id)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn reading_arbitrary_bytes_never_panics(bytes in vec(any::<u8>(), 0..200)) {
        read_all(&bytes);
    }

    /// The messages share most fields, so the bytes of one message are almost valid as another one.
    #[test]
    fn reading_arbitrary_node_messages_never_panics(
        volume_id in text(),
        target_path in text(),
        staging_target_path in text(),
        volume_capability in option::of(capability()),
        readonly in any::<bool>(),
        volume_context in hash_map(text(), text(), 0..3),
        capacity_range in option::of(range()),
    ) {
        let (volume_path, volume_capability) = (target_path.clone(), volume_capability);
        read_all(&wire::NodePublishVolumeRequest {
            volume_id: volume_id.clone(), target_path, staging_target_path: staging_target_path.clone(),
            volume_capability: volume_capability.clone(), readonly, volume_context: volume_context.clone(),
            ..Default::default()
        }.encode_to_vec());
        read_all(&wire::NodeStageVolumeRequest {
            volume_id: volume_id.clone(), staging_target_path: staging_target_path.clone(),
            volume_capability: volume_capability.clone(), volume_context, ..Default::default()
        }.encode_to_vec());
        read_all(&wire::NodeExpandVolumeRequest {
            volume_id, volume_path, capacity_range, staging_target_path, volume_capability, ..Default::default()
        }.encode_to_vec());
    }

    #[test]
    fn reading_arbitrary_controller_messages_never_panics(
        name in text(),
        capacity_range in option::of(range()),
        volume_capabilities in vec(capability(), 0..3),
        parameters in hash_map(text(), text(), 0..3),
        mutable_parameters in hash_map(text(), text(), 0..2),
        volume_content_source in option::of(source()),
        requisite in vec(topology(), 0..3),
        preferred in vec(topology(), 0..2),
        max_entries in any::<i32>(),
    ) {
        read_all(&wire::ListVolumesRequest { max_entries, starting_token: name.clone() }.encode_to_vec());
        read_all(&wire::ListSnapshotsRequest {
            max_entries, starting_token: name.clone(), source_volume_id: name.clone(), snapshot_id: name.clone(),
            ..Default::default()
        }.encode_to_vec());
        read_all(&wire::CreateSnapshotRequest {
            source_volume_id: name.clone(), name: name.clone(), parameters: parameters.clone(),
            accessibility_requirements: Some(wire::TopologyRequirement { requisite: requisite.clone(), preferred: preferred.clone() }),
            ..Default::default()
        }.encode_to_vec());
        read_all(&wire::ValidateVolumeCapabilitiesRequest {
            volume_id: name.clone(), volume_context: parameters.clone(), volume_capabilities: volume_capabilities.clone(),
            parameters: parameters.clone(), mutable_parameters: mutable_parameters.clone(), ..Default::default()
        }.encode_to_vec());
        read_all(&wire::ControllerExpandVolumeRequest {
            volume_id: name.clone(), capacity_range, volume_capability: volume_capabilities.first().cloned(),
            ..Default::default()
        }.encode_to_vec());
        read_all(&wire::GetCapacityRequest {
            volume_capabilities: volume_capabilities.clone(), parameters: parameters.clone(),
            accessible_topology: requisite.first().cloned(),
        }.encode_to_vec());
        read_all(&wire::CreateVolumeRequest {
            name, capacity_range, volume_capabilities, parameters, mutable_parameters, volume_content_source,
            accessibility_requirements: Some(wire::TopologyRequirement { requisite, preferred }), ..Default::default()
        }.encode_to_vec());
    }
}
