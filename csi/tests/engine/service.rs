//! Tests of the service of a driver in a container.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;

use csi_wire::csi as wire;
use nix::sys::statvfs::statvfs;
use rstest::rstest;
use tonic::Code;

use crate::container::{Machine, Rights, path_from};
use crate::support::*;

const MIB: i64 = 1 << 20;

fn machine() -> Machine {
    Machine::new(&path_from("LOOPFS_TEST_XFS"))
}

#[rstest]
#[case::privileged(Rights::Privileged)]
#[case::loop_devices(Rights::LoopDevices)]
fn driver_serves_socket_and_health_endpoints(#[case] rights: Rights) {
    let machine = machine().with_rights(rights);
    let driver = machine.start();
    driver.client.wait_until_ready();
    let info = driver.client.get_plugin_info(wire::GetPluginInfoRequest {}).unwrap();
    assert_eq!(info.name, DRIVER);
    machine.directories.register();
    machine.wait_until_alive();
    machine.wait_until_ready();
    let (status, metrics) = machine.page("/metrics");
    assert!(status == 200 && metrics.contains("loopfs_"), "{status} {metrics}");
    let (code, log) = driver.stop();
    assert_eq!(code, 0, "{log}");
}

/// Another container of the driver unpublishes the volume.
#[rstest]
#[case::privileged("privileged", machine())]
#[case::loop_devices("loop-devices", machine().with_rights(Rights::LoopDevices))]
#[case::loop_devices_in_its_own_dev("own-dev", machine().with_rights(Rights::LoopDevices).with_own_dev())]
fn block_volume_outlives_container_of_driver(#[case] volume: &str, #[case] machine: Machine) {
    let [target, other] = ["device", "other"].map(|name| machine.directories.kubelet.join(name));
    let driver = machine.start();
    driver.client.wait_until_ready();
    driver.client.create_volume(create(volume, 4 * MIB, block())).unwrap();
    driver.client.node_publish_volume(publish(volume, &target, block())).unwrap();
    let (code, log) = driver.stop();
    assert_eq!(code, 0, "{log}");
    assert!(!machine.directories.endpoint.exists(), "the socket is left");

    // The volume stays in use without a driver, on this machine and not only in the container.
    assert!(fs::metadata(&target).unwrap().file_type().is_block_device());
    let mut device = File::options().read(true).write(true).open(&target).unwrap();
    device.write_all(&[7; 4096]).unwrap();
    device.sync_all().unwrap();
    drop(device);
    let mut content = Vec::new();
    File::open(&target).unwrap().read_to_end(&mut content).unwrap();
    assert_eq!((content.len(), content[0]), (4 << 20, 7));

    let driver = machine.start();
    driver.client.wait_until_ready();
    // Otherwise this driver would detach the device that it does not know to be published.
    let read_only = driver.client.node_publish_volume(publish_read_only(volume, &other, block()));
    assert_refused(read_only, Code::FailedPrecondition, &["published for writing"]);
    let deleted = driver.client.delete_volume(delete(volume));
    assert_refused(deleted, Code::FailedPrecondition, &["still published"]);
    driver.client.node_unpublish_volume(unpublish(volume, &target)).unwrap();
    driver.client.delete_volume(delete(volume)).unwrap();
    assert!(!target.exists());
    assert_eq!(driver.stop().0, 0);
}

/// It is mounted on the machine and not only in the container.
#[test]
fn published_directory_has_exact_size() {
    let machine = machine();
    let target = machine.directories.kubelet.join("directory");
    let driver = machine.start();
    driver.client.wait_until_ready();
    driver.client.create_volume(create("directory", 4 * MIB, mount(&[]))).unwrap();
    driver.client.node_publish_volume(publish("directory", &target, mount(&[]))).unwrap();
    let status = statvfs(&target).unwrap();
    assert_eq!(status.blocks() * status.fragment_size(), 4 << 20);
    fs::write(target.join("file"), b"content").unwrap();
    driver.client.node_unpublish_volume(unpublish("directory", &target)).unwrap();
    assert!(!target.exists());
    driver.client.delete_volume(delete("directory")).unwrap();
    assert_eq!(driver.stop().0, 0);
}
