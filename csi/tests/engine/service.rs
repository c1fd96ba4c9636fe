//! Tests of what a driver in a container serves.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;

use csi::proto::csi as wire;
use nix::sys::statvfs::statvfs;
use rstest::rstest;

use crate::container::{Machine, Rights, path_from};
use crate::support::*;

const MIB: i64 = 1 << 20;

#[rstest]
#[case::privileged(Rights::Privileged)]
#[case::loop_devices(Rights::LoopDevices)]
fn the_driver_serves_its_socket_and_its_pages(#[case] rights: Rights) {
    let machine = Machine::new(&path_from("LOOPFS_TEST_XFS")).with_rights(rights);
    let driver = machine.start();
    driver.client.wait_until_ready();
    let info = driver.client.get_plugin_info(wire::GetPluginInfoRequest {}).unwrap();
    assert_eq!(info.name, DRIVER);
    for path in ["/healthz", "/readyz"] {
        let (status, body) = machine.page(path);
        assert_eq!(status, 200, "{path}: {body}");
    }
    let (status, metrics) = machine.page("/metrics");
    assert!(status == 200 && metrics.contains("loopfs_"), "{status} {metrics}");
    let (code, log) = driver.stop();
    assert_eq!(code, 0, "{log}");
}

#[rstest]
#[case::privileged(Rights::Privileged)]
#[case::loop_devices(Rights::LoopDevices)]
fn a_block_volume_is_published_until_it_is_unpublished_by_another_container(#[case] rights: Rights) {
    let machine = Machine::new(&path_from("LOOPFS_TEST_XFS")).with_rights(rights);
    let target = machine.directories.kubelet.join("device");
    let driver = machine.start();
    driver.client.wait_until_ready();
    driver.client.create_volume(create("block", 4 * MIB, block())).unwrap();
    driver.client.node_publish_volume(publish("block", &target, block())).unwrap();
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
    driver.client.node_unpublish_volume(unpublish("block", &target)).unwrap();
    driver.client.delete_volume(delete("block")).unwrap();
    assert!(!target.exists());
    assert_eq!(driver.stop().0, 0);
}

#[test]
fn a_filesystem_volume_is_published_on_the_machine_with_exactly_its_size() {
    let machine = Machine::new(&path_from("LOOPFS_TEST_XFS"));
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
