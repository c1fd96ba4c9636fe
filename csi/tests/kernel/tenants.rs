//! Tests of pods that change the loop device of their own volume. They need no capability for that: their container may open the
//! device for writing.

use std::fs::File;
use std::path::{Path, PathBuf};

use csi_wire::csi as wire;
use loopfs::Bytes;
use loopfs::fault_injection::{LoopStatusChange, bind_loop_device, change_loop_file, change_loop_status};
use loopfs::loop_device::unmanaged::Device;
use loopfs::loop_device::{Access, IndexPolicy, LoopControl};
use loopfs::volume_store::VolumeKind;
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, SFlag, mknod};
use tonic::Code;

use crate::driver_process::Process;
use crate::fixture::{Fixture, MIB, device_number, device_size, id, read_from, until_detached, write_to};
use crate::support::*;

/// The node that a container runtime creates in the container of a pod. The container can open it for as long as it runs, whatever is
/// mounted at the target.
struct ContainerNode(PathBuf);

impl ContainerNode {
    fn of(target: &Path) -> Self {
        // The other file systems are mounted nodev.
        let node = PathBuf::from(format!("/dev/of-container-{}", std::process::id()));
        mknod(&node, SFlag::S_IFBLK, Mode::S_IRUSR | Mode::S_IWUSR, device_number(target)).unwrap();
        Self(node)
    }
}

impl Drop for ContainerNode {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).ok();
    }
}

impl std::ops::Deref for ContainerNode {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

/// Unbinds a device as `losetup -d` in a container does.
fn unbind(node: &Path) {
    Device::open_path(node, Access::ReadWrite).unwrap().detach().unwrap();
}

/// A driver publishes a device, and is killed. Returns the node that the containers of the pod have.
fn publish_and_kill(fixture: &Fixture, request: wire::NodePublishVolumeRequest) -> ContainerNode {
    let (process, node) = Process::start_ready(&fixture.directories);
    let target = PathBuf::from(&request.target_path);
    node.node_publish_volume(request).unwrap();
    let own = ContainerNode::of(&target);
    process.kill(node);
    own
}

/// Each pod publishes while another driver is killed at another moment.
#[test]
fn killed_drivers_reuse_no_pods_index() {
    let fixture = Fixture::without_driver();
    fixture.volume("tenant", VolumeKind::Block);
    let tenant = fixture.target("tenant");
    let own = publish_and_kill(&fixture, publish("tenant", &tenant, block()));
    unbind(&own);

    let others: Vec<String> = (0..4).map(|n| format!("other-{n}")).collect();
    for (round, other) in others.iter().enumerate() {
        fixture.volume(other, VolumeKind::Block);
        let target = fixture.target(other);
        let (process, node) = Process::start_ready(&fixture.directories);
        std::thread::scope(|scope| {
            let publishing = scope.spawn(|| drop(node.node_publish_volume(publish(other, &target, block()))));
            // A little later in each round, in the call.
            (0..round).for_each(|_| drop(fixture.devices(other)));
            process.signal(Signal::SIGKILL);
            publishing.join().unwrap();
        });
        for device in fixture.devices(other) {
            let node = PathBuf::from(format!("/dev/loop{}", device.binding.index));
            assert_ne!(device_number(&node), device_number(&own), "{other} got the index of the pod");
        }
    }
    let (process, node) = Process::start_ready(&fixture.directories);
    for volume in others.iter().map(String::as_str).chain(["tenant"]) {
        let target = fixture.target(volume);
        if volume != "tenant" {
            node.node_publish_volume(publish(volume, &target, block())).unwrap();
            assert_ne!(device_number(&target), device_number(&own), "{volume} got the index of the pod");
        }
        node.node_unpublish_volume(unpublish(volume, &target)).unwrap();
    }
    process.stop(node);
    fixture.finish();
}

/// The pod binds its index to a file of its own while no driver runs, and unbinds it while the next one runs.
#[test]
fn indices_that_pods_bind_are_unused() {
    let mut fixture = Fixture::with_volume(VolumeKind::Block);
    let tenant = fixture.target("tenant");
    fixture.node().node_publish_volume(publish("v", &tenant, block())).unwrap();
    let own = ContainerNode::of(&tenant);
    fixture.detach_devices("v");
    let file = File::create_new(fixture.scratch().join("of-the-pod")).unwrap();
    file.set_len(MIB).unwrap();
    let device = File::options().read(true).write(true).open(&*own).unwrap();
    bind_loop_device(&device, &file).unwrap();
    drop((device, file));
    fixture.restart_driver();
    unbind(&own);
    for n in 0..3 {
        let other = format!("other-{n}");
        fixture.volume(&other, VolumeKind::Block);
        let target = fixture.target(&other);
        fixture.node().node_publish_volume(publish(&other, &target, block())).unwrap();
        assert_ne!(device_number(&target), device_number(&own), "{other} got the index of the pod");
        fixture.node().node_unpublish_volume(unpublish(&other, &target)).unwrap();
    }
    fixture.node().node_unpublish_volume(unpublish("v", &tenant)).unwrap();
    fixture.finish();
}

/// What a process can do that has the device of its volume open for writing. `docs/src/security.md` has this table for
/// administrators.
#[derive(Clone, Copy, Debug)]
enum Ioctl {
    Unbind,
    Status(LoopStatusChange),
    BufferedIo,
    BlockSize,
}

impl Ioctl {
    fn call(self, node: &Path) {
        let device = Device::open_path(node, Access::ReadWrite).unwrap();
        match self {
            Self::Unbind => device.detach().unwrap(),
            Self::Status(change) => {
                let file = File::options().read(true).write(true).open(node).unwrap();
                change_loop_status(file, change).unwrap();
            }
            Self::BufferedIo => device.set_direct_io(false).unwrap(),
            Self::BlockSize => device.set_block_size(4096).unwrap(),
        }
    }
}

/// The condition of the volume reports the change before a new publication repairs it.
#[test]
fn change_by_pod_is_repaired() {
    let fixture = Fixture::new();
    for (number, (ioctl, reported)) in [
        (Ioctl::Unbind, "last close"),
        (Ioctl::Status(LoopStatusChange::AutoClear), "last close"),
        (Ioctl::Status(LoopStatusChange::Offset(4096)), "offset: 4096"),
        (Ioctl::Status(LoopStatusChange::SizeLimit(8192)), "8192"),
        (Ioctl::Status(LoopStatusChange::Label), "label"),
        (Ioctl::BufferedIo, "lost direct I/O"),
        (Ioctl::BlockSize, "4096 granted"),
    ]
    .into_iter()
    .enumerate()
    {
        change_and_repair(&fixture, &format!("v-{number}"), ioctl, reported);
    }
    fixture.finish();
}

fn change_and_repair(fixture: &Fixture, volume: &str, ioctl: Ioctl, reported: &str) {
    fixture.volume(volume, VolumeKind::Block);
    let (target, four) = (fixture.target("target"), i64::try_from(4 * MIB).unwrap());
    let publish = || fixture.node().node_publish_volume(publish(volume, &target, block())).map(drop);
    publish().unwrap();
    let own = ContainerNode::of(&target);
    write_to(&own, b"kept").unwrap();
    let restored = || {
        let condition = fixture.node().condition(volume);
        assert!(!condition.abnormal, "{ioctl:?}: {condition:?}");
        let [device] = fixture.devices(volume).try_into().unwrap();
        assert!(device.direct_io && !device.auto_clear && device.block_size == 512, "{ioctl:?}: {device:?}");
        assert_eq!(read_from(&own, 4), b"kept", "{ioctl:?}");
    };
    restored();

    ioctl.call(&own);
    let changed = fixture.node().condition(volume);
    assert!(changed.abnormal && changed.message.contains(reported), "{ioctl:?}: {changed:?}");
    publish().unwrap();
    restored();
    assert_eq!(device_size(&File::open(&*own).unwrap()), MIB);

    ioctl.call(&own);
    fixture.store.expand(&id(volume), Bytes(4 * MIB)).unwrap();
    let size = fixture.node().node_expand_volume(expand(volume, &target, four, 0)).unwrap();
    assert_eq!(size.capacity_bytes, four);
    restored();
    assert_eq!(device_size(&File::open(&*own).unwrap()), 4 * MIB);

    ioctl.call(&own);
    fixture.node().node_unpublish_volume(unpublish(volume, &target)).unwrap();
    assert_eq!(fixture.devices(volume), []);
}

/// The kernel neither ends the scan nor refuses it.
#[test]
fn partition_scans_end_with_the_publication() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let own = ContainerNode::of(&target);
    Ioctl::Status(LoopStatusChange::PartitionScan).call(&own);
    for _ in 0..2 {
        let condition = fixture.node().condition("v");
        assert!(condition.abnormal && condition.message.contains("partitions"), "{condition:?}");
        fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    }
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert!(!fixture.devices("v")[0].partition_scan);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

/// A process of another pod got the descriptor of the device (`SCM_RIGHTS`), and outlives the pod.
#[test]
fn kept_descriptors_reach_no_other_volume() {
    let mut fixture = Fixture::with_volume(VolumeKind::Block);
    let tenant = fixture.target("tenant");
    fixture.node().node_publish_volume(publish("v", &tenant, block())).unwrap();
    let own = ContainerNode::of(&tenant);
    let number = device_number(&own);
    fixture.detach_devices("v");
    let kept = File::options().read(true).write(true).open(&*own).unwrap();
    drop(own);
    fixture.node().node_unpublish_volume(unpublish("v", &tenant)).unwrap();
    // Finds the device idle and its node mounted nowhere.
    fixture.restart_driver();
    let others = ["v", "other-1", "other-2"];
    for other in others {
        if other != "v" {
            fixture.volume(other, VolumeKind::Block);
        }
        let target = fixture.target(other);
        fixture.node().node_publish_volume(publish(other, &target, block())).unwrap();
        assert_ne!(device_number(&target), number, "{other} is open in another pod");
    }
    for other in others {
        fixture.node().node_unpublish_volume(unpublish(other, &fixture.target(other))).unwrap();
    }
    drop(kept);
    fixture.finish();
}

/// The pod changes the offset while no driver runs. The next driver still knows the device.
#[test]
fn offset_changed_before_start_is_restored() {
    let fixture = Fixture::without_driver();
    fixture.volume("v", VolumeKind::Block);
    let target = fixture.target("v");
    let (process, node) = Process::start_ready(&fixture.directories);
    node.node_publish_volume(publish("v", &target, block())).unwrap();
    let own = ContainerNode::of(&target);
    write_to(&own, b"kept").unwrap();
    process.kill(node);
    let offset = Ioctl::Status(LoopStatusChange::Offset(4096));
    offset.call(&own);
    let (process, node) = Process::start_ready(&fixture.directories);
    let condition = node.condition("v");
    assert!(condition.abnormal && condition.message.contains("offset: 4096"), "{condition:?}");
    node.node_publish_volume(publish("v", &target, block())).unwrap();
    assert_eq!(read_from(&own, 4), b"kept");
    offset.call(&own);
    node.node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(fixture.devices("v"), []);
    process.stop(node);
    fixture.finish();
}

/// Binds the read-only device of a pod to another file.
fn replace_file(fixture: &Fixture, own: &Path, name: &str) {
    let file = File::create_new(fixture.scratch().join(name)).unwrap();
    file.set_len(MIB).unwrap();
    change_loop_file(File::open(own).unwrap(), &file).unwrap();
}

/// A pod replaces the file while no driver runs, and another one while the driver holds its device.
#[test]
fn replaced_files_of_devices_are_reported() {
    let fixture = Fixture::without_driver();
    fixture.volume("v", VolumeKind::Block);
    fixture.volume("other", VolumeKind::Block);
    let (target, others) = (fixture.target("v"), fixture.target("other"));
    let own = publish_and_kill(&fixture, publish_read_only("v", &target, block()));
    replace_file(&fixture, &own, "of-the-pod");
    drop(own);

    let (process, node) = Process::start_ready(&fixture.directories);
    // The kubelet asks for each volume that it has published.
    let stats = node.node_get_volume_stats(stats("v", &target)).unwrap();
    assert!(stats.volume_condition.unwrap().abnormal);
    let condition = node.condition("v");
    assert!(condition.abnormal && condition.message.contains("is attached to"), "{condition:?}");
    let refused = node.node_publish_volume(publish_read_only("v", &target, block()));
    assert_refused(refused, Code::FailedPrecondition, &["end the workloads"]);
    // No other volume is concerned, whatever the label.
    let publish_other = || node.node_publish_volume(publish_read_only("other", &others, block()));
    publish_other().unwrap();
    let other = node.condition("other");
    assert!(!other.abnormal, "{other:?}");

    let own = ContainerNode::of(&others);
    replace_file(&fixture, &own, "of-the-other-pod");
    drop(own);
    let other = node.controller_get_volume(get("other")).unwrap().status.unwrap();
    assert_eq!(other.published_node_ids, [NODE]);
    let condition = other.volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("is attached to"), "{condition:?}");
    assert_refused(publish_other(), Code::FailedPrecondition, &["end the workloads"]);
    for (volume, target) in [("other", &others), ("v", &target)] {
        node.node_unpublish_volume(unpublish(volume, target)).unwrap();
    }
    assert_eq!(LoopControl::open().unwrap().list().unwrap().devices, []);
    publish_other().unwrap();
    node.node_unpublish_volume(unpublish("other", &others)).unwrap();
    process.stop(node);
    fixture.finish();
}

/// The pod gives its device the label of another volume.
#[test]
fn labels_concern_no_other_volume() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    fixture.volume("x", VolumeKind::Block);
    let targets = ["v", "x"].map(|volume| (volume, fixture.target(volume)));
    for (volume, target) in &targets {
        fixture.node().node_publish_volume(publish(volume, target, block())).unwrap();
    }
    let own = ContainerNode::of(&targets[0].1);
    // Changes the label from `v` to `x`.
    Ioctl::Status(LoopStatusChange::Label).call(&own);
    assert!(fixture.node().condition("v").abnormal);
    let other = fixture.node().condition("x");
    assert!(!other.abnormal, "{other:?}");
    for (volume, target) in &targets {
        fixture.node().node_unpublish_volume(unpublish(volume, target)).unwrap();
    }
    fixture.finish();
}

/// A process of another pod cancels the detach with a descriptor that it got.
#[test]
fn a_cancelled_detach_is_repeated() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("v");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let own = ContainerNode::of(&target);
    let kept = File::options().read(true).write(true).open(&*own).unwrap();
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(fixture.devices("v").len(), 1);
    change_loop_status(&kept, LoopStatusChange::Persistent).unwrap();
    drop((kept, own));
    until_detached();
    fixture.finish();
}

/// A device that another program has bound before is that of the volume.
#[test]
fn devices_outside_the_range_are_held() {
    let fixture = Fixture::without_driver();
    fixture.volume("v", VolumeKind::Block);
    let target = fixture.target("v");
    let options = fixture.store.volume(&id("v")).unwrap().attach_options(Access::ReadWrite).unwrap();
    let device =
        LoopControl::open().unwrap().attach(fixture.image("v"), &options.index(IndexPolicy::Exact(3)));
    drop(device.unwrap());
    let (process, node) = Process::start_ready(&fixture.directories);
    node.node_publish_volume(publish("v", &target, block())).unwrap();
    let own = ContainerNode::of(&target);
    write_to(&own, b"kept").unwrap();
    process.kill(node);
    let (process, node) = Process::start_ready(&fixture.directories);
    unbind(&own);
    assert_eq!(read_from(&own, 4), b"kept", "the driver holds the device");
    node.node_unpublish_volume(unpublish("v", &target)).unwrap();
    drop(own);
    process.stop(node);
    fixture.finish();
}
