use std::collections::HashMap;
use std::path::Path;

use csi_wire::csi as wire;
use csi_wire::csi::volume_capability::{
    self as capability, AccessMode, BlockVolume, MountVolume, access_mode::Mode,
};
use loopfs::Bytes;
use loopfs::loop_device::Access;
use loopfs::mount::MountFlags;
use loopfs::publish::PublishMode;
use rstest::rstest;

use super::field::CapacityRange;
use super::reader::RequestReader;
use crate::driver::ThisNode;

const TARGET: &str = "/var/lib/kubelet/pods/1/mount";
const STAGING: &str = "/var/lib/kubelet/plugins/kubernetes.io/csi/staging";
const UUID: &str = "0123abcd-0000-4000-8000-00000000beef";

pub(super) fn reader() -> RequestReader {
    let driver_name = "csi.loopfs.dev".parse().unwrap();
    let node = ThisNode::new(&driver_name, "node-1".to_owned());
    RequestReader::new(&driver_name, node, Path::new("/var/lib/kubelet"))
}

fn capability_of(access_type: capability::AccessType, mode: Mode) -> wire::VolumeCapability {
    wire::VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(AccessMode { mode: mode as i32 }),
    }
}

pub(super) fn mount(mode: Mode) -> wire::VolumeCapability {
    capability_of(capability::AccessType::Mount(MountVolume::default()), mode)
}

pub(super) fn block(mode: Mode) -> wire::VolumeCapability {
    capability_of(capability::AccessType::Block(BlockVolume {}), mode)
}

fn publish(capability: wire::VolumeCapability) -> wire::NodePublishVolumeRequest {
    wire::NodePublishVolumeRequest {
        volume_id: "pvc-1".to_owned(),
        target_path: TARGET.to_owned(),
        staging_target_path: STAGING.to_owned(),
        volume_capability: Some(capability),
        ..wire::NodePublishVolumeRequest::default()
    }
}

#[test]
fn a_publish_request_is_converted() {
    let mut request = publish(mount(Mode::SingleNodeWriter));
    request.volume_context = HashMap::from([("csi.loopfs.dev/filesystem-uuid".to_owned(), UUID.to_owned())]);
    let publish = reader().publish(request).unwrap();
    assert_eq!(publish.volume.as_str(), "pvc-1");
    assert_eq!(publish.filesystem, Some(UUID.parse().unwrap()));
    assert_eq!(publish.target.relative(), Path::new("pods/1/mount"));
    assert_eq!(publish.mode, PublishMode::Directory(MountFlags::default()));
    assert!(!publish.single_target);
}

#[rstest]
#[case(Mode::SingleNodeWriter, false, Access::ReadWrite, false)]
#[case(Mode::SingleNodeWriter, true, Access::ReadOnly, false)]
#[case(Mode::SingleNodeReaderOnly, false, Access::ReadOnly, false)]
#[case(Mode::SingleNodeSingleWriter, false, Access::ReadWrite, true)]
#[case(Mode::SingleNodeSingleWriter, true, Access::ReadOnly, true)]
#[case(Mode::SingleNodeMultiWriter, false, Access::ReadWrite, false)]
fn an_access_mode_determines_access_and_number_of_targets(
    #[case] mode: Mode,
    #[case] readonly: bool,
    #[case] access: Access,
    #[case] single_target: bool,
) {
    let read = reader().publish(wire::NodePublishVolumeRequest { readonly, ..publish(block(mode)) }).unwrap();
    assert_eq!((read.mode, read.single_target), (PublishMode::Device(access), single_target));
    let read = reader().publish(wire::NodePublishVolumeRequest { readonly, ..publish(mount(mode)) }).unwrap();
    let flags = MountFlags { read_only: access == Access::ReadOnly, ..MountFlags::default() };
    assert_eq!((read.mode, read.single_target), (PublishMode::Directory(flags), single_target));
}

#[rstest]
#[case::no_mode(wire::VolumeCapability { access_mode: None, ..mount(Mode::SingleNodeWriter) })]
#[case::no_type(wire::VolumeCapability { access_type: None, ..mount(Mode::SingleNodeWriter) })]
#[case::unknown_mode(mount(Mode::Unknown))]
#[case::readers_on_many_nodes(mount(Mode::MultiNodeReaderOnly))]
#[case::writer_on_many_nodes(mount(Mode::MultiNodeSingleWriter))]
#[case::writers_on_many_nodes(block(Mode::MultiNodeMultiWriter))]
#[case::mode_of_the_future(wire::VolumeCapability { access_mode: Some(AccessMode { mode: 99 }), ..mount(Mode::Unknown) })]
#[case::other_file_system(capability_of(
    capability::AccessType::Mount(MountVolume { fs_type: "ext4".to_owned(), ..MountVolume::default() }),
    Mode::SingleNodeWriter
))]
#[case::group(capability_of(
    capability::AccessType::Mount(MountVolume { volume_mount_group: "7".to_owned(), ..MountVolume::default() }),
    Mode::SingleNodeWriter
))]
#[case::flag(capability_of(
    capability::AccessType::Mount(MountVolume { mount_flags: vec!["loop".to_owned()], ..MountVolume::default() }),
    Mode::SingleNodeWriter
))]
fn unsupported_capabilities_are_refused(#[case] capability: wire::VolumeCapability) {
    let error = reader().publish(publish(capability.clone())).unwrap_err().to_string();
    assert!(error.starts_with("volume_capability: ") || error.starts_with("mount_flags: "), "{error}");
    let stage = wire::NodeStageVolumeRequest {
        volume_id: "pvc-1".to_owned(),
        staging_target_path: TARGET.to_owned(),
        volume_capability: Some(capability),
        ..wire::NodeStageVolumeRequest::default()
    };
    assert!(reader().stage(stage).is_err());
}

#[rstest]
#[case::volume(|request: &mut wire::NodePublishVolumeRequest| request.volume_id.clear(), "volume_id: ")]
#[case::volume_elsewhere(|request: &mut wire::NodePublishVolumeRequest| request.volume_id = "../x".to_owned(), "volume_id: ")]
#[case::long_volume(|request: &mut wire::NodePublishVolumeRequest| request.volume_id = "v".repeat(4096), "volume_id: ")]
#[case::target(|request: &mut wire::NodePublishVolumeRequest| request.target_path.clear(), "target_path: ")]
#[case::target_elsewhere(|request: &mut wire::NodePublishVolumeRequest| request.target_path = "/etc".to_owned(), "target_path: ")]
#[case::staging_path_elsewhere(|request: &mut wire::NodePublishVolumeRequest| request.staging_target_path = "/etc".to_owned(), "staging_target_path: ")]
#[case::capability(|request: &mut wire::NodePublishVolumeRequest| request.volume_capability = None, "volume_capability: ")]
#[case::uuid(|request: &mut wire::NodePublishVolumeRequest| {
    request.volume_context.insert("csi.loopfs.dev/filesystem-uuid".to_owned(), "none".to_owned());
}, "volume_context: ")]
fn a_publish_request_with_an_invalid_field_is_refused(
    #[case] spoil: impl FnOnce(&mut wire::NodePublishVolumeRequest),
    #[case] field: &str,
) {
    let mut request = publish(block(Mode::SingleNodeWriter));
    spoil(&mut request);
    let error = reader().publish(request).unwrap_err().to_string();
    assert!(error.starts_with(field), "{error}");
}

#[test]
fn a_volume_must_be_staged_first() {
    let request = wire::NodePublishVolumeRequest {
        staging_target_path: String::new(),
        ..publish(block(Mode::SingleNodeWriter))
    };
    let error = reader().publish(request).unwrap_err();
    assert_eq!(error.code(), tonic::Code::FailedPrecondition, "{error}");
    assert!(error.to_string().starts_with("staging_target_path: "), "{error}");
}

#[rstest]
#[case::absent(None, Ok(CapacityRange::default()))]
#[case::unspecified(Some((0, 0)), Ok(CapacityRange::default()))]
#[case::require_non_empty(Some((1, 0)), Ok(CapacityRange { required: Some(Bytes(1)), limit: None }))]
#[case::limit(Some((0, i64::MAX)), Ok(CapacityRange { required: None, limit: Some(Bytes(i64::MAX as u64)) }))]
#[case::both(Some((5, 5)), Ok(CapacityRange { required: Some(Bytes(5)), limit: Some(Bytes(5)) }))]
#[case::crossed(Some((6, 5)), Err(()))]
#[case::negative(Some((-1, 0)), Err(()))]
#[case::negative_limit(Some((0, i64::MIN)), Err(()))]
fn a_capacity_range_must_be_consistent(
    #[case] range: Option<(i64, i64)>,
    #[case] expected: Result<CapacityRange, ()>,
) {
    let range =
        range.map(|(required_bytes, limit_bytes)| wire::CapacityRange { required_bytes, limit_bytes });
    assert_eq!(CapacityRange::parse(range).map_err(drop), expected);
}

#[test]
fn unused_fields_are_ignored() {
    let mut request = publish(block(Mode::SingleNodeWriter));
    request.volume_context.insert("other/filesystem-uuid".to_owned(), "x".to_owned());
    request.publish_context.insert("a".to_owned(), "b".to_owned());
    request.secrets.insert("token".to_owned(), "t".to_owned());
    assert_eq!(reader().publish(request).unwrap().filesystem, None);
}
