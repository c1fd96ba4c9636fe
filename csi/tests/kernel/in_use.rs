//! Tests that a published volume is not deleted, even by the provisioner, which does not see the mounts of
//! this driver.

use loopfs::ErrorKind;
use loopfs::volume_store::VolumeKind;

use crate::driver_process::Process;
use crate::fixture::{Fixture, id};
use crate::support::*;

/// Returns the reason why a volume cannot be deleted.
fn refusal(fixture: &Fixture, volume: &str) -> String {
    let error = fixture.store.delete(&id(volume)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    error.to_string()
}

#[test]
fn published_directory_cannot_be_deleted() {
    let mut fixture = Fixture::with_volume(VolumeKind::Filesystem);
    let (first, second) = (fixture.target("first"), fixture.target("second"));
    for target in [&first, &second] {
        fixture.node().node_publish_volume(publish("v", target, mount(&[]))).unwrap();
    }
    assert!(refusal(&fixture, "v").contains(second.to_str().unwrap()));
    fixture.restart_driver();
    refusal(&fixture, "v");
    fixture.node().node_unpublish_volume(unpublish("v", &second)).unwrap();
    assert!(refusal(&fixture, "v").contains(first.to_str().unwrap()));
    fixture.node().node_unpublish_volume(unpublish("v", &first)).unwrap();
    assert!(fixture.store.delete(&id("v")).unwrap());
    fixture.finish();
}

#[test]
fn staged_device_cannot_be_deleted() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let (staging, target) = (fixture.target("staging"), fixture.target("target"));
    fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    assert!(refusal(&fixture, "v").contains("/dev/loop"));
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert!(refusal(&fixture, "v").contains("/dev/loop"));
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    assert!(fixture.store.delete(&id("v")).unwrap());
    fixture.finish();
}

#[test]
fn killed_driver_leaves_no_undeletable_volume() {
    let fixture = Fixture::without_driver();
    fixture.volume("published", VolumeKind::Filesystem);
    fixture.volume("not", VolumeKind::Filesystem);
    let target = fixture.target("target");
    let take_over = || Process::start_ready(&fixture.directories);
    let (process, node) = take_over();
    node.node_publish_volume(publish("published", &target, mount(&[]))).unwrap();
    process.kill(node);
    refusal(&fixture, "published");
    // A driver that was killed between the record and the mount leaves this state.
    let never = fixture.target("never");
    fixture.store.record_publication(&id("not"), never.parent().unwrap(), &never).unwrap();

    let (process, node) = take_over();
    assert!(refusal(&fixture, "published").contains(target.to_str().unwrap()));
    assert!(fixture.store.delete(&id("not")).unwrap());
    node.node_unpublish_volume(unpublish("published", &target)).unwrap();
    assert!(fixture.store.delete(&id("published")).unwrap());
    process.stop(node);
    fixture.finish();
}
