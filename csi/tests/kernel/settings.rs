//! Tests of the settings that Block volumes get from their StorageClass, checked on the device.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use csi_wire::csi as wire;
use loopfs::loop_device::{Access, AttachOptions, LoopControl, LoopDevice};
use loopfs::volume_store::VolumeKind;
use rstest::rstest;
use tonic::Code;

use crate::fixture::{Fixture, id, read_from, write_to};
use crate::support::*;

const FOUR: i64 = 4 << 20;

fn created_with(name: &str, parameters: &[(&str, &str)]) -> wire::CreateVolumeRequest {
    let parameters = parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    wire::CreateVolumeRequest { parameters, ..create(name, FOUR, block()) }
}

/// Returns the discard limit of the device at a target, in bytes.
fn discards(target: &Path) -> u64 {
    let index = LoopDevice::open_path(target).unwrap().index();
    let text = fs::read_to_string(format!("/sys/block/loop{index}/queue/discard_max_bytes")).unwrap();
    text.trim().parse().unwrap()
}

#[rstest]
#[case::nothing_asked(&[], 512, false)]
#[case::large_blocks(&[("logicalBlockSize", "4096")], 4096, false)]
#[case::direct(&[("directIO", "required")], 512, false)]
#[case::thin(&[("provisioning", "thin"), ("logicalBlockSize", "512")], 512, true)]
#[case::all(&[("provisioning", "thin"), ("logicalBlockSize", "4096"), ("directIO", "required")], 4096, true)]
fn device_has_settings_of_its_class(
    #[case] parameters: &[(&str, &str)],
    #[case] block_size: u32,
    #[case] thin: bool,
) {
    let mut fixture = Fixture::new();
    let target = fixture.target("target");
    fixture.node().create_volume(created_with("v", parameters)).unwrap();
    for _ in 0..2 {
        fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
        let status = &fixture.devices("v")[0];
        assert_eq!((status.block_size, status.direct_io), (block_size, true), "{status:?}");
        assert_eq!(discards(&target) > 0, thin);
        write_to(&target, &vec![9; block_size as usize]).unwrap();
        fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
        // The next driver, which no longer has the device open, finds the recorded settings.
        fixture.restart_driver();
    }
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert_eq!(read_from(&target, 4), [9; 4]);
    let stats = fixture.node().node_get_volume_stats(stats("v", &target)).unwrap();
    assert!(!stats.volume_condition.unwrap().abnormal);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

/// The state after a driver was killed between attaching the device and disabling discards.
#[test]
fn staging_or_publishing_disables_discards() {
    let fixture = Fixture::new();
    let (target, staging) = (fixture.target("target"), fixture.target("staging"));
    fixture.node().create_volume(created_with("v", &[])).unwrap();
    let control = LoopControl::open().unwrap();
    for stages in [false, true] {
        let image = fixture.store.volume(&id("v")).unwrap().open_image(Access::ReadWrite).unwrap();
        let device = control.attach(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
        assert!(discards(&device.path()) > 0);
        if stages {
            fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
            assert_eq!(discards(&device.path()), 0);
        }
        fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
        assert_eq!(discards(&target), 0);
        drop((image, device));
        fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
        assert_eq!(fixture.devices("v"), []);
    }
    drop(control);
    fixture.finish();
}

#[rstest]
#[case::direct_io("directIO", "preferred", "required")]
#[case::block_size("logicalBlockSize", "512", "4096")]
#[case::provisioning("provisioning", "thick", "thin")]
fn same_name_with_other_settings_fails(#[case] name: &str, #[case] default: &str, #[case] other: &str) {
    let fixture = Fixture::new();
    let node = fixture.node();
    let volume = node.create_volume(created_with("v", &[])).unwrap().volume;
    let refused = node.create_volume(created_with("v", &[(name, other)]));
    assert_refused(refused, Code::AlreadyExists, &["v", name, default, other]);
    assert_eq!(node.create_volume(created_with("v", &[(name, default)])).unwrap().volume, volume);

    let request = |value: &str| {
        let parameters = [(name.to_owned(), value.to_owned())].into();
        let request = wire::ValidateVolumeCapabilitiesRequest { parameters, ..validate("v", block()) };
        node.validate_volume_capabilities(request).unwrap()
    };
    assert_eq!(request(default).confirmed.unwrap().parameters.len(), 1);
    let response = request(other);
    assert_eq!(response.confirmed, None);
    assert!(response.message.contains(name) && response.message.contains(default), "{}", response.message);
    fixture.finish();
}

/// One StorageClass serves both kinds of volume.
#[test]
fn filesystem_volume_accepts_device_settings() {
    let fixture = Fixture::new();
    let settings = [("directIO", "required"), ("logicalBlockSize", "4096"), ("provisioning", "thin")];
    let request = wire::CreateVolumeRequest {
        volume_capabilities: Vec::from_iter(mount(&[])),
        ..created_with("v", &settings)
    };
    for _ in 0..2 {
        fixture.node().create_volume(request.clone()).unwrap();
    }
    let volume = fixture.store.volume(&id("v")).unwrap();
    assert_eq!((volume.kind(), volume.image().unwrap()), (VolumeKind::Filesystem, None));
    drop(volume);
    fixture.finish();
}
