//! Tests of Block volumes that are published for writing or read-only.

use std::fs::File;

use loopfs::loop_device::Access;
use loopfs::volume_store::VolumeKind;
use tonic::Code;

use crate::fixture::{Fixture, repeated, write_to};
use crate::support::*;

#[test]
fn writable_staging_allows_read_only_publication() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let (staging, reader) = (fixture.target("staging"), fixture.target("reader"));
    let read_only = publish_read_only("v", &reader, block());
    // The kubelet stages with the access mode of the PersistentVolume, and publishes read-only if the pod requests that.
    for _ in 0..2 {
        fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
        fixture.node().node_publish_volume(read_only.clone()).unwrap();
        let access = fixture.devices("v").iter().map(|status| status.binding.access).collect::<Vec<_>>();
        assert_eq!(access, [Access::ReadOnly]);
    }
    assert!(write_to(&reader, b"lost").is_err());
    fixture.node().node_unpublish_volume(unpublish("v", &reader)).unwrap();
    fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    assert_eq!(fixture.devices("v"), []);
    fixture.finish();
}

#[test]
fn open_writer_delays_read_only_publication() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let (writer, reader) = (fixture.target("writer"), fixture.target("reader"));
    let read_only = publish_read_only("v", &reader, block());
    fixture.node().node_publish_volume(publish("v", &writer, block())).unwrap();
    let index = fixture.devices("v")[0].binding.index;
    let open = File::options().write(true).open(format!("/dev/loop{index}")).unwrap();
    fixture.node().node_unpublish_volume(unpublish("v", &writer)).unwrap();
    let published = || repeated(|| fixture.node().node_publish_volume(read_only.clone()));
    assert_refused(published(), Code::Aborted, &[&format!("/dev/loop{index}"), "open"]);
    drop(open);
    published().unwrap();
    fixture.node().node_unpublish_volume(unpublish("v", &reader)).unwrap();
    assert_eq!(fixture.devices("v"), []);
    fixture.finish();
}
