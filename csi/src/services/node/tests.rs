use csi_wire::csi::volume_capability::access_mode::Mode;
use csi_wire::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use rstest::rstest;

use super::*;
use crate::request::tests::{block, capability_of, mount, reader};

const TARGET: &str = "/var/lib/kubelet/pods/1/mount";
const STAGING: &str = "/var/lib/kubelet/plugins/kubernetes.io/csi/staging";

fn publish(capability: wire::VolumeCapability) -> wire::NodePublishVolumeRequest {
    wire::NodePublishVolumeRequest {
        volume_id: "pvc-1".to_owned(),
        target_path: TARGET.to_owned(),
        staging_target_path: STAGING.to_owned(),
        volume_capability: Some(capability),
        ..wire::NodePublishVolumeRequest::default()
    }
}

#[rstest]
#[case(Mode::SingleNodeWriter, false, Access::ReadWrite, false)]
#[case(Mode::SingleNodeWriter, true, Access::ReadOnly, false)]
#[case(Mode::SingleNodeReaderOnly, false, Access::ReadOnly, false)]
#[case(Mode::SingleNodeSingleWriter, false, Access::ReadWrite, true)]
#[case(Mode::SingleNodeSingleWriter, true, Access::ReadOnly, true)]
#[case(Mode::SingleNodeMultiWriter, false, Access::ReadWrite, false)]
fn access_mode_determines_access_and_targets(
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
    AccessType::Mount(MountVolume { fs_type: "ext4".to_owned(), ..MountVolume::default() }),
    Mode::SingleNodeWriter
))]
#[case::group(capability_of(
    AccessType::Mount(MountVolume { volume_mount_group: "7".to_owned(), ..MountVolume::default() }),
    Mode::SingleNodeWriter
))]
#[case::flag(capability_of(
    AccessType::Mount(MountVolume { mount_flags: vec!["loop".to_owned()], ..MountVolume::default() }),
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
