//! Tests of a restarted driver, which serves the volumes of the previous one.

use loopfs::ErrorKind;
use loopfs::volume_store::VolumeKind;

use crate::driver_process::Process;
use crate::fixture::{Fixture, id};
use crate::support::*;

#[test]
fn repeated_calls_complete_interrupted_ones() {
    let mut fixture = Fixture::new();
    fixture.volume("b", VolumeKind::Block);
    let (target, staging) = (fixture.target("target"), fixture.target("staging"));

    // State: the device is attached and the file created, but not yet mounted.
    fixture.node().node_stage_volume(stage("b", &staging, block())).unwrap();
    std::fs::write(&target, "").unwrap();
    fixture.restart_driver();
    fixture.node().node_publish_volume(publish("b", &target, block())).unwrap();
    assert_eq!((fixture.mounts_at(&target), fixture.devices("b").len()), (1, 1));

    // State: the target is unmounted, but the file not yet removed.
    assert!(loopfs::mount::unmount(&target).unwrap());
    fixture.restart_driver();
    fixture.node().node_unpublish_volume(unpublish("b", &target)).unwrap();
    assert!(!target.exists());
    assert_eq!(fixture.devices("b"), []);

    // State: the file is removed, but the device not yet detached.
    fixture.node().node_stage_volume(stage("b", &staging, block())).unwrap();
    fixture.restart_driver();
    fixture.node().node_unpublish_volume(unpublish("b", &target)).unwrap();
    assert_eq!(fixture.devices("b"), []);
    fixture.finish();
}

/// Returns the reason why a volume cannot be deleted.
fn refusal(fixture: &Fixture, volume: &str) -> String {
    let error = fixture.store.delete(&id(volume)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    error.to_string()
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
