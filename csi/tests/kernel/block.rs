//! Block volumes.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::time::Duration;

use csi::proto::csi as wire;
use csi::proto::csi::volume_capability::access_mode::Mode as AccessMode;
use csi::proto::csi::volume_capability::{AccessType, BlockVolume};
use csi::proto::csi::volume_usage::Unit;
use loopfs::Bytes;
use loopfs::loop_device::{Access, AttachOptions, LoopControl};
use loopfs::mount::MountFlags;
use loopfs::volume_store::VolumeKind;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{Mode, SFlag, mknod};
use rstest::rstest;
use tonic::Code;

use crate::scene::{MIB, Scene, device_number, device_size, id, is_block_device, read_from, write_to};
use crate::support::*;

#[test]
fn publish_and_unpublish_are_idempotent() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let (staging, target) = (scene.target("staging"), scene.target("target"));
    for _ in 0..2 {
        scene.node().node_stage_volume(stage("v", &staging, block())).unwrap();
        assert_eq!(scene.devices("v").len(), 1);
    }
    for _ in 0..2 {
        scene.node().node_publish_volume(publish("v", &target, block())).unwrap();
        assert_eq!((scene.mounts_at(&target), scene.devices("v").len()), (1, 1));
    }
    assert!(is_block_device(&target));
    assert_eq!(device_size(&File::open(&target).unwrap()), MIB);
    let status = &scene.devices("v")[0];
    assert!(status.direct_io && status.block_size == 512, "{status:?}");
    write_to(&target, b"kept").unwrap();
    for _ in 0..2 {
        scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
        assert!(!target.exists());
    }
    for _ in 0..2 {
        scene.node().node_unstage_volume(unstage("v", &staging)).unwrap();
        assert_eq!(scene.devices("v"), []);
    }

    // As after a reboot: the orchestrator does not stage the volume again.
    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert_eq!(read_from(&target, 4), b"kept");
    scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}

#[test]
fn unstaging_succeeds_without_publication_and_without_staging() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let staging = scene.target("staging");
    scene.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    scene.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    scene.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}

#[test]
fn a_read_only_publication_is_read_only_at_the_block_layer() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let (writer, reader) = (scene.target("writer"), scene.target("reader"));
    scene.node().node_publish_volume(publish("v", &writer, block())).unwrap();
    write_to(&writer, b"seen").unwrap();
    scene.node().node_unpublish_volume(unpublish("v", &writer)).unwrap();

    let read_only = wire::NodePublishVolumeRequest { readonly: true, ..publish("v", &reader, block()) };
    for _ in 0..2 {
        scene.node().node_publish_volume(read_only.clone()).unwrap();
        assert_eq!((scene.mounts_at(&reader), scene.devices("v").len()), (1, 1));
    }
    assert!(write_to(&reader, b"lost").is_err());
    assert_eq!(read_from(&reader, 4), b"seen");
    let other_way = publish("v", &reader, block());
    assert_refused(
        scene.node().node_publish_volume(other_way),
        Code::AlreadyExists,
        &["reader", "unpublish"],
    );
    scene.node().node_unpublish_volume(unpublish("v", &reader)).unwrap();
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}

/// Each device has a page cache of its own. A volume is therefore not published for writing and read-only at the same
/// time.
#[test]
fn a_read_only_device_beside_a_writable_one_returns_old_data() {
    let scene = Scene::without_driver();
    scene.volume("v", VolumeKind::Block);
    let control = LoopControl::open().unwrap();
    let [reader, writer] = [Access::ReadOnly, Access::ReadWrite].map(|access| {
        let image = scene.store.volume(&id("v")).unwrap().open_image(access).unwrap();
        control.ensure_attached(image.as_fd(), &AttachOptions::new(access)).unwrap().path()
    });
    // An open device keeps its cache.
    let open = File::open(&reader).unwrap();
    assert_eq!(read_from(&reader, 3), [0; 3]);
    write_to(&writer, b"new").unwrap();
    assert_eq!(read_from(&reader, 3), [0; 3], "the kernel keeps the two devices coherent");
    drop(open);
    let image = scene.store.volume(&id("v")).unwrap().open_image(Access::ReadOnly).unwrap();
    control.detach_all(image.as_fd()).unwrap();
    drop((image, control));
    scene.finish();
}

#[test]
fn a_volume_is_published_for_writing_or_read_only_but_not_both() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let [writer, reader, second] = ["writer", "reader", "second"].map(|name| scene.target(name));
    let read_only =
        |target| wire::NodePublishVolumeRequest { readonly: true, ..publish("v", target, block()) };

    scene.node().node_publish_volume(read_only(&reader)).unwrap();
    let refused = scene.node().node_publish_volume(publish("v", &writer, block()));
    assert_refused(
        refused,
        Code::FailedPrecondition,
        &["read-only at", reader.to_str().unwrap(), "old data"],
    );
    assert!(!writer.exists());
    scene.node().node_publish_volume(read_only(&second)).unwrap();
    assert_eq!(scene.devices("v").len(), 1);
    for target in [&reader, &second] {
        scene.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }

    scene.node().node_publish_volume(publish("v", &writer, block())).unwrap();
    let refused = scene.node().node_publish_volume(read_only(&reader));
    assert_refused(
        refused,
        Code::FailedPrecondition,
        &["for writing at", writer.to_str().unwrap(), "old data"],
    );
    assert!(!reader.exists());
    // A program that reads while the writer has data that is not on the disk yet uses the writer's device.
    scene.node().node_publish_volume(publish("v", &second, block())).unwrap();
    assert_eq!(scene.devices("v").len(), 1);
    for target in [&writer, &second] {
        scene.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}

#[test]
fn staging_for_writing_does_not_prevent_a_read_only_publication() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let (staging, reader) = (scene.target("staging"), scene.target("reader"));
    let read_only = wire::NodePublishVolumeRequest { readonly: true, ..publish("v", &reader, block()) };
    // The kubelet stages with the access mode of the PersistentVolume, and publishes read-only if the pod requests that.
    for _ in 0..2 {
        scene.node().node_stage_volume(stage("v", &staging, block())).unwrap();
        scene.node().node_publish_volume(read_only.clone()).unwrap();
        let access = scene.devices("v").iter().map(|status| status.binding.access).collect::<Vec<_>>();
        assert_eq!(access, [Access::ReadOnly]);
    }
    assert!(write_to(&reader, b"lost").is_err());
    scene.node().node_unpublish_volume(unpublish("v", &reader)).unwrap();
    scene.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}

#[test]
fn a_device_that_a_process_has_open_for_writing_delays_a_read_only_publication() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let (writer, reader) = (scene.target("writer"), scene.target("reader"));
    let read_only = wire::NodePublishVolumeRequest { readonly: true, ..publish("v", &reader, block()) };
    scene.node().node_publish_volume(publish("v", &writer, block())).unwrap();
    let index = scene.devices("v")[0].binding.index;
    let open = File::options().write(true).open(format!("/dev/loop{index}")).unwrap();
    scene.node().node_unpublish_volume(unpublish("v", &writer)).unwrap();
    let refused = scene.node().node_publish_volume(read_only.clone());
    assert_refused(refused, Code::Aborted, &[&format!("/dev/loop{index}"), "open"]);
    drop(open);
    scene.node().node_publish_volume(read_only).unwrap();
    scene.node().node_unpublish_volume(unpublish("v", &reader)).unwrap();
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}

/// A file that a pod can have the kubelet mount as a subPath of its own volume.
#[derive(Clone, Copy)]
enum Decoy {
    Directory,
    File,
    /// A container may create nodes of devices that it may not open.
    Node,
}

#[rstest]
#[case::directory(Decoy::Directory)]
#[case::file(Decoy::File)]
#[case::device_node(Decoy::Node)]
fn a_tenants_mount_that_is_named_like_a_loop_device_does_not_keep_a_volume_published(#[case] decoy: Decoy) {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let (staging, target) = (scene.target("staging"), scene.target("target"));
    scene.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let index = scene.devices("v")[0].binding.index;
    let (empty_dir, sub_path) = (scene.target("empty-dir"), scene.target("sub-path"));
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
    let node = open(&source, OFlag::O_PATH, Mode::empty()).unwrap();
    loopfs::mount::bind_mount(node.as_fd(), &sub_path, MountFlags::default()).unwrap();
    drop(node);

    scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(scene.devices("v"), []);
    scene.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    let listed = scene.node().controller_get_volume(get("v")).unwrap().status.unwrap();
    assert_eq!(listed.published_node_ids, [""; 0]);
    scene.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    assert_eq!(scene.devices("v"), []);
    assert!(loopfs::mount::unmount(&sub_path).unwrap());
    scene.finish();
}

#[test]
fn several_workloads_share_one_device() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let targets = ["a", "b", "c"].map(|name| scene.target(name));
    for target in &targets {
        scene.node().node_publish_volume(publish("v", target, block())).unwrap();
    }
    assert_eq!(scene.devices("v").len(), 1);
    write_to(&targets[0], b"seen").unwrap();
    assert_eq!(read_from(&targets[2], 4), b"seen");
    let staging = scene.target("staging");
    for target in &targets {
        let refused = scene.node().node_unstage_volume(unstage("v", &staging));
        assert_refused(refused, Code::FailedPrecondition, &["still published"]);
        assert_eq!(scene.devices("v").len(), 1);
        scene.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}

#[rstest]
#[case::for_writing(false)]
#[case::read_only(true)]
fn a_volume_expands_while_it_is_in_use(#[case] readonly: bool) {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let (first, second) = (scene.target("first"), scene.target("second"));
    for target in [&first, &second] {
        let request = wire::NodePublishVolumeRequest { readonly, ..publish("v", target, block()) };
        scene.node().node_publish_volume(request).unwrap();
    }
    let open = [&first, &second].map(|target| File::open(target).unwrap());

    let four = i64::try_from(4 * MIB).unwrap();
    let early = scene.node().node_expand_volume(expand("v", &first, four, 0));
    assert_refused(early, Code::Aborted, &["1 MiB", "4 MiB"]);
    scene.store.expand(&id("v"), Bytes(4 * MIB)).unwrap();
    for (required, limit) in [(four, 0), (0, 0), (0, four), (1, four)] {
        let size = scene.node().node_expand_volume(expand("v", &first, required, limit)).unwrap();
        assert_eq!(size.capacity_bytes, four);
    }
    assert_refused(
        scene.node().node_expand_volume(expand("v", &first, 0, four - 1)),
        Code::OutOfRange,
        &["limit"],
    );
    assert_eq!(open.map(|device| device_size(&device)), [4 * MIB; 2]);

    for target in [&first, &second] {
        scene.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }
    let unpublished = scene.node().node_expand_volume(expand("v", &first, four, 0)).unwrap();
    assert_eq!(unpublished.capacity_bytes, four);
    scene.finish();
}

#[test]
fn a_device_is_refreshed_before_node_expand_volume_is_called() {
    // This time passes only if the test fails.
    const LONG: Duration = Duration::from_secs(60);
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let target = scene.target("target");
    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let open = File::open(&target).unwrap();
    scene.store.expand(&id("v"), Bytes(4 * MIB)).unwrap();
    assert!(scene.store.wait_for_device_size(&id("v"), Bytes(4 * MIB), LONG).unwrap());
    assert_eq!(device_size(&open), 4 * MIB);
    drop(open);

    scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    scene.store.expand(&id("v"), Bytes(6 * MIB)).unwrap();
    assert!(scene.store.wait_for_device_size(&id("v"), Bytes(6 * MIB), LONG).unwrap(), "it has no device");
    scene.finish();
}

#[test]
fn stats_are_of_the_volume() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let target = scene.target("target");
    assert_refused(
        scene.node().node_get_volume_stats(stats("v", &target)),
        Code::NotFound,
        &["not published"],
    );
    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();

    // The kubelet passes the path of a bind mount of its own.
    let elsewhere = scene.target("elsewhere");
    fs::write(&elsewhere, "").unwrap();
    let node = open(&target, OFlag::O_PATH, Mode::empty()).unwrap();
    loopfs::mount::bind_mount(node.as_fd(), &elsewhere, MountFlags::default()).unwrap();
    drop(node);
    for path in [&target, &elsewhere] {
        let answer = scene.node().node_get_volume_stats(stats("v", path)).unwrap();
        let [usage] = answer.usage.try_into().unwrap();
        assert_eq!((usage.unit(), usage.total), (Unit::Bytes, i64::try_from(MIB).unwrap()));
        assert!(!answer.volume_condition.unwrap().abnormal);
    }

    // The device stays attached while it is mounted anywhere.
    scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(scene.devices("v").len(), 1);
    assert!(loopfs::mount::unmount(&elsewhere).unwrap());
    scene.node().node_unstage_volume(unstage("v", &scene.target("staging"))).unwrap();
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}

#[test]
fn a_device_that_was_detached_is_not_published_for_the_volume() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    scene.volume("other", VolumeKind::Block);
    let (target, others) = (scene.target("target"), scene.target("others"));
    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();

    // `losetup -d` does the same. The number then belongs to the other volume.
    let image = scene.store.volume(&id("v")).unwrap().open_image(Access::ReadOnly).unwrap();
    LoopControl::open().unwrap().detach_all(image.as_fd()).unwrap();
    drop(image);
    scene.node().node_publish_volume(publish("other", &others, block())).unwrap();
    write_to(&others, b"other").unwrap();

    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert_ne!(device_number(&target), device_number(&others));
    assert_eq!((scene.mounts_at(&target), scene.devices("v").len()), (1, 1));
    assert_eq!(read_from(&target, 5), [0; 5]);
    for (volume, target) in [("v", &target), ("other", &others)] {
        scene.node().node_unpublish_volume(unpublish(volume, target)).unwrap();
    }
    scene.finish();
}

#[test]
fn unpublishing_a_stale_target_does_not_detach_the_device_of_another_volume() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    scene.volume("other", VolumeKind::Block);
    let (target, others) = (scene.target("target"), scene.target("others"));
    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let image = scene.store.volume(&id("v")).unwrap().open_image(Access::ReadOnly).unwrap();
    LoopControl::open().unwrap().detach_all(image.as_fd()).unwrap();
    drop(image);
    scene.node().node_publish_volume(publish("other", &others, block())).unwrap();

    scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    scene.node().node_unstage_volume(unstage("v", &scene.target("staging"))).unwrap();
    assert!(!target.exists());
    assert_eq!(scene.devices("other").len(), 1);
    write_to(&others, b"works").unwrap();
    scene.node().node_unpublish_volume(unpublish("other", &others)).unwrap();
    scene.finish();
}

#[test]
fn a_device_that_is_open_is_detached_when_it_is_closed() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let target = scene.target("target");
    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let open = File::open(&target).unwrap();
    assert_refused(scene.node().node_unpublish_volume(unpublish("v", &target)), Code::Aborted, &["in use"]);
    drop(open);

    // A container has a device node of its own, so a file that it has open does not keep the target busy.
    let index = scene.devices("v")[0].binding.index;
    let open = File::open(format!("/dev/loop{index}")).unwrap();
    scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert!(!target.exists());

    // The next workload starts while the last one still has the device open, and runs longer.
    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();
    drop(open);
    write_to(&target, b"works").unwrap();
    assert_eq!(scene.devices("v").len(), 1);
    scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}

#[test]
fn publish_accepts_an_existing_file_and_rejects_directories_and_symlinks() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let ask = |name: &str| scene.node().node_publish_volume(publish("v", &scene.target(name), block()));

    fs::write(scene.target("file"), "").unwrap();
    ask("file").unwrap();
    fs::create_dir(scene.target("directory")).unwrap();
    assert_refused(ask("directory"), Code::FailedPrecondition, &["not a file"]);
    symlink(scene.target("file"), scene.target("link")).unwrap();
    assert_refused(ask("link"), Code::FailedPrecondition, &["not a file"]);
    assert_refused(ask("absent/target"), Code::FailedPrecondition, &["does not exist"]);
    assert_eq!(scene.mounts_at(&scene.target("file")), 1);

    for name in ["directory", "link", "file"] {
        scene.node().node_unpublish_volume(unpublish("v", &scene.target(name))).unwrap();
        assert!(!scene.target(name).exists());
    }
    scene.finish();
}

#[test]
fn a_single_writer_volume_is_published_at_one_target_at_a_time() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let single = capability(AccessType::Block(BlockVolume {}), AccessMode::SingleNodeSingleWriter);
    let (first, second) = (scene.target("first"), scene.target("second"));
    for _ in 0..2 {
        scene.node().node_publish_volume(publish("v", &first, single.clone())).unwrap();
    }
    let refused = scene.node().node_publish_volume(publish("v", &second, single.clone()));
    assert_refused(refused, Code::FailedPrecondition, &[first.to_str().unwrap()]);
    assert!(!second.exists());
    scene.node().node_unpublish_volume(unpublish("v", &first)).unwrap();
    scene.node().node_publish_volume(publish("v", &second, single)).unwrap();
    scene.node().node_unpublish_volume(unpublish("v", &second)).unwrap();
    scene.finish();
}

#[test]
fn concurrent_publish_calls_leave_one_mount_and_one_device() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let target = scene.target("target");
    let results = scene.node().publish_concurrently(&publish("v", &target, block()), 16);
    assert!(results.iter().any(Result::is_ok));
    for refused in results.into_iter().filter(Result::is_err) {
        assert_refused(refused, Code::Aborted, &["in progress"]);
    }
    assert_eq!((scene.mounts_at(&target), scene.devices("v").len()), (1, 1));
    scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    scene.finish();
}

#[test]
fn mount_access_to_a_block_volume_is_refused() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let target = scene.target("target");
    let as_mount = publish("v", &target, mount(&[]));
    assert_refused(scene.node().node_publish_volume(as_mount), Code::InvalidArgument, &["mount", "Block"]);
    assert!(!target.exists());
    assert_eq!(scene.devices("v"), []);
    scene.finish();
}
