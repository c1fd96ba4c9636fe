//! Tests of the settings that Block volumes get from their StorageClass, checked on the device.

use std::fs;
use std::path::Path;

use csi_wire::csi as wire;
use loopfs::loop_device::LoopDevice;
use loopfs::volume_store::VolumeKind;
use tonic::Code;

use crate::fixture::{Fixture, id, read_from, write_to};
use crate::support::*;

const FOUR: i64 = 4 << 20;

type Parameters<'a> = &'a [(&'a str, &'a str)];

fn created_with(name: &str, parameters: Parameters<'_>) -> wire::CreateVolumeRequest {
    let parameters = parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    wire::CreateVolumeRequest { parameters, ..create(name, FOUR, block()) }
}

/// Returns the discard limit of the device at a target, in bytes.
fn discards(target: &Path) -> u64 {
    let index = LoopDevice::open_path(target).unwrap().index();
    let text = fs::read_to_string(format!("/sys/block/loop{index}/queue/discard_max_bytes")).unwrap();
    text.trim().parse().unwrap()
}

#[test]
fn device_has_settings_of_its_class() {
    let mut fixture = Fixture::new();
    let cases: [(Parameters<'_>, u32, bool); 6] = [
        (&[], 512, false),
        (&[("logicalBlockSize", "4096")], 4096, false),
        (&[("directIO", "required"), ("logicalBlockSize", "512")], 512, false),
        (&[("directIO", "required"), ("logicalBlockSize", "4096")], 4096, false),
        (&[("provisioning", "thin"), ("logicalBlockSize", "512")], 512, true),
        (&[("provisioning", "thin"), ("logicalBlockSize", "4096"), ("directIO", "required")], 4096, true),
    ];
    let volumes = ["v-0", "v-1", "v-2", "v-3", "v-4", "v-5"];
    for (volume, (parameters, ..)) in volumes.iter().zip(cases) {
        fixture.node().create_volume(created_with(volume, parameters)).unwrap();
    }
    let target = fixture.target("target");
    for is_first_driver in [true, false] {
        for (volume, (parameters, block_size, thin)) in volumes.iter().zip(cases) {
            fixture.node().node_publish_volume(publish(volume, &target, block())).unwrap();
            let status = &fixture.devices(volume)[0];
            assert_eq!(
                (status.block_size, status.direct_io),
                (block_size, true),
                "{parameters:?}: {status:?}"
            );
            assert_eq!(discards(&target) > 0, thin, "{parameters:?}");
            if is_first_driver {
                write_to(&target, &vec![9; block_size as usize]).unwrap();
            } else {
                assert_eq!(read_from(&target, 4), [9; 4]);
                assert!(!fixture.node().condition(volume).abnormal);
            }
            fixture.node().node_unpublish_volume(unpublish(volume, &target)).unwrap();
        }
        // The next driver, which no longer has the devices open, finds the recorded settings.
        fixture.restart_driver();
    }
    fixture.finish();
}

#[test]
fn same_name_with_other_settings_fails() {
    let fixture = Fixture::new();
    let node = fixture.node();
    let volume = node.create_volume(created_with("v", &[])).unwrap().volume;
    for (name, default, other) in [
        ("directIO", "preferred", "required"),
        ("logicalBlockSize", "512", "4096"),
        ("provisioning", "thick", "thin"),
    ] {
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
        let message = response.message;
        assert!(message.contains(name) && message.contains(default), "{message}");
    }
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
