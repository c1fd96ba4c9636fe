//! Tests of Block volumes.

use std::fs::{self, File};

use csi::volume_mounts::mount_points;
use csi_wire::csi as wire;
use csi_wire::csi::volume_usage::Unit;
use loopfs::Bytes;
use loopfs::loop_device::LoopControl;
use loopfs::volume_store::VolumeKind;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::{Mode, SFlag, mknod};
use rstest::rstest;
use tonic::Code;

use crate::calls_in_progress::{lock_image, until_free, wait_until_busy};
use crate::fixture::{
    Fixture, MIB, bind_mount_node, device_number, device_size, id, read_from, repeated, write_to,
};
use crate::support::*;

/// Each close of a writable descriptor makes udev examine the device.
#[test]
fn publishing_opens_device_for_writing_once() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let (staging, target) = (fixture.target("staging"), fixture.target("target"));
    fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    let device = format!("/dev/loop{}", fixture.devices("v")[0].binding.index);
    let watch = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
    // The kernel merges equal events that follow each other. An open is between each two closes.
    watch.add_watch(device.as_str(), AddWatchFlags::IN_OPEN | AddWatchFlags::IN_CLOSE_WRITE).unwrap();
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let events = watch.read_events().unwrap();
    // Each attach opens the device for writing. udev examines a device that was closed after that.
    let closed = events.iter().filter(|event| event.mask.contains(AddWatchFlags::IN_CLOSE_WRITE)).count();
    assert_eq!(closed, 1, "{events:?}");
    drop(watch);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(fixture.devices("v"), []);
    fixture.finish();
}

/// The volume is deleted while the driver attaches its device.
#[test]
fn publishing_fails_after_concurrent_deletion() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    let lock = lock_image(&fixture, "v");
    let slow = Client::connect(&fixture.directories.endpoint);
    std::thread::scope(|scope| {
        let response =
            scope.spawn(|| until_free(|| slow.node_publish_volume(publish("v", &target, block()))));
        wait_until_busy(fixture.node(), "v", &target);
        fixture.delete_in_use("v");
        drop(lock);
        assert_refused(response.join().unwrap(), Code::NotFound, &["v"]);
    });
    drop(slow);
    assert_eq!(LoopControl::open().unwrap().list().unwrap().devices, []);
    assert!(!target.exists());
    fixture.finish();
}

/// A file that a pod can have the kubelet mount as a subPath of its own volume.
#[derive(Clone, Copy)]
enum Decoy {
    Directory,
    File,
    /// A container may create nodes of devices that it may not open.
    Node,
}

/// A pod mounts a file, directory or device node with the name of the volume's loop device.
#[rstest]
#[case::directory(Decoy::Directory)]
#[case::file(Decoy::File)]
#[case::device_node(Decoy::Node)]
fn decoy_mount_is_no_publication(#[case] decoy: Decoy) {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let (staging, target) = (fixture.target("staging"), fixture.target("target"));
    fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let index = fixture.devices("v")[0].binding.index;
    let (empty_dir, sub_path) = (fixture.target("empty-dir"), fixture.target("sub-path"));
    fs::create_dir(&empty_dir).unwrap();
    let source = empty_dir.join(format!("loop{index}"));
    match decoy {
        Decoy::Directory => fs::create_dir(&source).unwrap(),
        Decoy::File => fs::write(&source, "").unwrap(),
        Decoy::Node => mknod(&source, SFlag::S_IFBLK, Mode::S_IRWXU, device_number(&target)).unwrap(),
    }
    match decoy {
        Decoy::Directory => fs::create_dir(&sub_path).unwrap(),
        Decoy::File | Decoy::Node => fs::write(&sub_path, "").unwrap(),
    }
    bind_mount_node(&source, &sub_path);
    let published = mount_points(&fixture.directories.data, &id("v")).unwrap();
    assert_eq!(published, Some(vec![target.clone()]));

    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(fixture.devices("v"), []);
    fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    let listed = fixture.node().controller_get_volume(get("v")).unwrap().status.unwrap();
    assert_eq!(listed.published_node_ids, [""; 0]);
    fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    assert_eq!(fixture.devices("v"), []);
    assert!(loopfs::mount::unmount(&sub_path).unwrap());
    fixture.finish();
}

#[test]
fn several_workloads_share_one_device() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let targets = ["a", "b", "c"].map(|name| fixture.target(name));
    for target in &targets {
        fixture.node().node_publish_volume(publish("v", target, block())).unwrap();
    }
    assert_eq!(fixture.devices("v").len(), 1);
    write_to(&targets[0], b"seen").unwrap();
    assert_eq!(read_from(&targets[2], 4), b"seen");
    let staging = fixture.target("staging");
    for target in &targets {
        let refused = fixture.node().node_unstage_volume(unstage("v", &staging));
        assert_refused(refused, Code::FailedPrecondition, &["still published"]);
        assert_eq!(fixture.devices("v").len(), 1);
        fixture.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }
    assert_eq!(fixture.devices("v"), []);
    fixture.finish();
}

#[rstest]
#[case::for_writing(false)]
#[case::read_only(true)]
fn volume_expands_while_in_use(#[case] readonly: bool) {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let (first, second) = (fixture.target("first"), fixture.target("second"));
    for target in [&first, &second] {
        let request = wire::NodePublishVolumeRequest { readonly, ..publish("v", target, block()) };
        fixture.node().node_publish_volume(request).unwrap();
    }
    let open = [&first, &second].map(|target| File::open(target).unwrap());

    let four = i64::try_from(4 * MIB).unwrap();
    let early = fixture.node().node_expand_volume(expand("v", &first, four, 0));
    assert_refused(early, Code::Aborted, &["1 MiB", "4 MiB"]);
    fixture.store.expand(&id("v"), Bytes(4 * MIB)).unwrap();
    for (required, limit) in [(four, 0), (0, 0), (0, four), (1, four)] {
        let size = fixture.node().node_expand_volume(expand("v", &first, required, limit)).unwrap();
        assert_eq!(size.capacity_bytes, four);
    }
    assert_refused(
        fixture.node().node_expand_volume(expand("v", &first, 0, four - 1)),
        Code::OutOfRange,
        &["limit"],
    );
    assert_eq!(open.map(|device| device_size(&device)), [4 * MIB; 2]);

    // The kubelet still names the target of a pod that has ended, if that pod was the last to map the volume.
    fixture.node().node_unpublish_volume(unpublish("v", &second)).unwrap();
    let ended = fixture.node().node_expand_volume(expand("v", &second, four, 0)).unwrap();
    assert_eq!(ended.capacity_bytes, four);
    std::fs::write(&second, "of another volume").unwrap();
    let other = fixture.node().node_expand_volume(expand("v", &second, four, 0));
    assert_refused(other, Code::NotFound, &["volume v is not published at", "second"]);
    std::fs::remove_file(&second).unwrap();

    fixture.node().node_unpublish_volume(unpublish("v", &first)).unwrap();
    let unpublished = fixture.node().node_expand_volume(expand("v", &first, four, 0));
    assert_refused(unpublished, Code::NotFound, &["volume v is not published at", "first"]);
    let staged = wire::NodeExpandVolumeRequest {
        staging_target_path: first.to_str().unwrap().to_owned(),
        ..expand("v", &first, four, 0)
    };
    assert_eq!(fixture.node().node_expand_volume(staged).unwrap().capacity_bytes, four);
    fixture.finish();
}

#[test]
fn stats_are_of_the_volume() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    assert_refused(
        fixture.node().node_get_volume_stats(stats("v", &target)),
        Code::NotFound,
        &["not published"],
    );
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();

    // The kubelet passes the path of a bind mount of its own.
    let elsewhere = fixture.target("elsewhere");
    fs::write(&elsewhere, "").unwrap();
    bind_mount_node(&target, &elsewhere);
    for path in [&target, &elsewhere] {
        let response = fixture.node().node_get_volume_stats(stats("v", path)).unwrap();
        let [usage] = response.usage.try_into().unwrap();
        assert_eq!((usage.unit(), usage.total), (Unit::Bytes, i64::try_from(MIB).unwrap()));
        assert!(!response.volume_condition.unwrap().abnormal);
    }

    // The device stays attached while it is mounted anywhere.
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(fixture.devices("v").len(), 1);
    assert!(loopfs::mount::unmount(&elsewhere).unwrap());
    fixture.node().node_unstage_volume(unstage("v", &fixture.target("staging"))).unwrap();
    assert_eq!(fixture.devices("v"), []);
    fixture.finish();
}

/// An administrator restored it from a backup that has no extended attributes, and the store cannot tell its block size.
#[test]
fn an_image_without_attributes_is_unpublished() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let (staging, target) = (fixture.target("staging"), fixture.target("target"));
    fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    for attribute in ["trusted.loopfs.image", "trusted.loopfs.capacity"] {
        rustix::fs::fremovexattr(fixture.image("v"), attribute).unwrap();
    }
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    assert_eq!(fixture.devices("v"), []);
    let refused = fixture.node().node_publish_volume(publish("v", &target, block()));
    assert_refused(refused, Code::FailedPrecondition, &["trusted.loopfs.", "delete the volume"]);
    fixture.finish();
}

#[test]
fn detached_devices_stay_mounted_until_unpublish() {
    let mut fixture = Fixture::with_volume(VolumeKind::Block);
    fixture.volume("other", VolumeKind::Block);
    let (target, others) = (fixture.target("target"), fixture.target("others"));
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let number = device_number(&target);

    fixture.detach_devices("v");
    fixture.node().node_publish_volume(publish("other", &others, block())).unwrap();
    write_to(&others, b"other").unwrap();
    assert_ne!(device_number(&others), number, "the containers of the pod still have the node");

    let refused = fixture.node().node_publish_volume(publish("v", &target, block()));
    assert_refused(refused, Code::FailedPrecondition, &["detached", "end the workloads"]);
    assert_eq!((fixture.mounts_at(&target), device_number(&target)), (1, number));
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.node().node_unstage_volume(unstage("v", &fixture.target("staging"))).unwrap();
    assert_eq!(read_from(&others, 5), b"other", "the device of the other volume is kept");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert_eq!(read_from(&target, 5), [0; 5]);
    for (volume, target) in [("v", &target), ("other", &others)] {
        fixture.node().node_unpublish_volume(unpublish(volume, target)).unwrap();
    }
    fixture.finish();
}

#[test]
fn open_device_is_detached_on_close() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let open = File::open(&target).unwrap();
    assert_refused(fixture.node().node_unpublish_volume(unpublish("v", &target)), Code::Aborted, &["in use"]);
    drop(open);

    // A container has a device node of its own, so a file that it has open does not keep the target busy.
    let index = fixture.devices("v")[0].binding.index;
    let open = File::open(format!("/dev/loop{index}")).unwrap();
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert!(!target.exists());

    // The next workload starts while the last one still has the device open, and runs longer.
    repeated(|| fixture.node().node_publish_volume(publish("v", &target, block()))).unwrap();
    drop(open);
    write_to(&target, b"works").unwrap();
    assert_eq!(fixture.devices("v").len(), 1);
    repeated(|| fixture.node().node_unpublish_volume(unpublish("v", &target))).unwrap();
    assert_eq!(fixture.devices("v"), []);
    fixture.finish();
}
