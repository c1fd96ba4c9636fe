//! Tests of a restarted driver, which serves the volumes of the previous one.

use loopfs::volume_store::VolumeKind;
use loopfs::{Bytes, ErrorKind};

use crate::driver_process::Process;
use crate::fixture::{Fixture, MIB, id, read_from, size_of_mount, write_to};
use crate::support::*;

/// The earlier driver was killed while volumes were published.
#[test]
fn new_driver_serves_existing_volumes() {
    let fixture = Fixture::without_driver();
    fixture.volume("f", VolumeKind::Filesystem);
    fixture.volume("b", VolumeKind::Block);
    let (mounted, device, staging) =
        (fixture.target("mounted"), fixture.target("device"), fixture.target("staging"));
    let directories = &fixture.directories;
    let take_over = || Process::start_ready(directories);

    let (process, node) = take_over();
    node.node_stage_volume(stage("b", &staging, block())).unwrap();
    node.node_publish_volume(publish("f", &mounted, mount(&[]))).unwrap();
    node.node_publish_volume(publish("b", &device, block())).unwrap();
    write_to(&device, b"kept").unwrap();
    process.kill(node);
    assert!(
        directories.endpoint.exists() && directories.registration_socket().exists(),
        "the killed driver has removed its sockets"
    );
    assert_eq!((fixture.mounts_at(&mounted), fixture.mounts_at(&device)), (1, 1));

    let (process, node) = take_over();
    node.node_publish_volume(publish("f", &mounted, mount(&[]))).unwrap();
    node.node_publish_volume(publish("b", &device, block())).unwrap();
    assert_eq!(
        (fixture.mounts_at(&mounted), fixture.mounts_at(&device), fixture.devices("b").len()),
        (1, 1, 1)
    );
    for volume in ["f", "b"] {
        fixture.store.expand(&id(volume), Bytes(4 * MIB)).unwrap();
    }
    process.kill(node);

    let (process, node) = take_over();
    let four = i64::try_from(4 * MIB).unwrap();
    assert_eq!(node.node_expand_volume(expand("f", &mounted, four, 0)).unwrap().capacity_bytes, four);
    assert_eq!(node.node_expand_volume(expand("b", &device, four, 0)).unwrap().capacity_bytes, four);
    assert_eq!(size_of_mount(&mounted).0, 4 * MIB);
    assert_eq!(read_from(&device, 4), b"kept");
    node.node_unpublish_volume(unpublish("f", &mounted)).unwrap();
    process.kill(node);

    let (process, node) = take_over();
    node.node_unpublish_volume(unpublish("f", &mounted)).unwrap();
    node.node_unpublish_volume(unpublish("b", &device)).unwrap();
    node.node_unstage_volume(unstage("b", &staging)).unwrap();
    assert_eq!(fixture.devices("b"), []);
    process.stop(node);
    assert!(!directories.endpoint.exists() && !directories.registration_socket().exists());
    fixture.finish();
}

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
