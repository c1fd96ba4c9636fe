//! Tests of Block volumes that are published for writing or read-only.

use std::fs::File;

use loopfs::loop_device::Access;
use loopfs::volume_store::VolumeKind;
use tonic::Code;

use crate::fixture::{Fixture, repeated, write_to};
use crate::support::*;

#[test]
fn writable_and_read_only_publications_conflict() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let [writer, reader, second] = ["writer", "reader", "second"].map(|name| fixture.target(name));
    let read_only = |target| publish_read_only("v", target, block());

    fixture.node().node_publish_volume(read_only(&reader)).unwrap();
    let refused = fixture.node().node_publish_volume(publish("v", &writer, block()));
    assert_refused(
        refused,
        Code::FailedPrecondition,
        &["read-only at", reader.to_str().unwrap(), "old data"],
    );
    assert!(!writer.exists());
    fixture.node().node_publish_volume(read_only(&second)).unwrap();
    assert_eq!(fixture.devices("v").len(), 1);
    for target in [&reader, &second] {
        fixture.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }

    fixture.node().node_publish_volume(publish("v", &writer, block())).unwrap();
    let refused = fixture.node().node_publish_volume(read_only(&reader));
    assert_refused(
        refused,
        Code::FailedPrecondition,
        &["for writing at", writer.to_str().unwrap(), "old data"],
    );
    assert!(!reader.exists());
    // A program that reads while the writer has data that is not on the disk yet uses the writer's device.
    fixture.node().node_publish_volume(publish("v", &second, block())).unwrap();
    assert_eq!(fixture.devices("v").len(), 1);
    for target in [&writer, &second] {
        fixture.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }
    assert_eq!(fixture.devices("v"), []);
    fixture.finish();
}

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
