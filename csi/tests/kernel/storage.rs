//! Tests in which the data file system is mounted, unmounted and replaced while the driver runs.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use loopfs::mount::{MountFlags, bind_mount, table as mountinfo};
use loopfs::volume_store::VolumeKind;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::Mode;
use tonic::Code;

use crate::fixture::{Fixture, path_from};
use crate::support::*;

fn bind_mount_at(source: &Path, target: &Path) {
    let source = open(source, OFlag::O_PATH | OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    bind_mount(source.as_fd(), target, MountFlags::default()).unwrap();
}

/// The driver waits until the file system is mounted at the data directory.
#[test]
fn driver_detects_mount_and_its_loss() {
    let mut fixture = Fixture::without_driver();
    fixture.volume("v", VolumeKind::Filesystem);
    let (here, data) = (path_from("LOOPFS_TEST_XFS"), fixture.scratch().join("data"));
    fs::create_dir(&data).unwrap();
    fixture.directories.data = data.clone();
    let target = fixture.target("target");
    let driver = Driver::start(&fixture.directories);
    assert_refused(driver.wait_for_probe(), Code::FailedPrecondition, &["nothing is mounted there"]);
    assert!(!fixture.directories.registration_socket().exists());

    bind_mount_at(&here, &data);
    driver.wait_until_ready();
    driver.node_publish_volume(publish("v", &target, mount(&[]))).unwrap();
    fixture.directories.wait_for_registration_socket();

    umount2(&data, MntFlags::MNT_DETACH).unwrap();
    assert_refused(driver.probe_now(), Code::FailedPrecondition, &["nothing is mounted there"]);
    let other = fixture.target("other");
    let refused = driver.node_publish_volume(publish("v", &other, mount(&[])));
    assert_refused(refused, Code::FailedPrecondition, &["nothing is mounted there"]);
    assert!(!other.exists());
    // Workloads can stop, and nothing is written below the empty mount point.
    driver.node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(fs::read_dir(&data).unwrap().count(), 0);

    bind_mount_at(&here, &data);
    driver.wait_until_ready();
    driver.node_publish_volume(publish("v", &target, mount(&[]))).unwrap();
    driver.node_unpublish_volume(unpublish("v", &target)).unwrap();
    driver.stop();
    umount2(&data, MntFlags::empty()).unwrap();
    fixture.finish();
}

#[test]
fn filesystem_with_other_uuid_is_refused() {
    let mut fixture = Fixture::without_driver();
    let (here, data) = (path_from("LOOPFS_TEST_XFS"), fixture.scratch().join("data"));
    fs::create_dir(&data).unwrap();
    bind_mount_at(&here, &data);
    let other = "00000000-1111-4222-8333-444444444444";
    fs::write(fixture.scratch().join("data.filesystem-uuid"), other).unwrap();
    fixture.directories.data = data.clone();
    let driver = Driver::start(&fixture.directories);
    let uuid = fixture.store.filesystem_uuid().to_string();
    assert_refused(driver.wait_for_probe(), Code::FailedPrecondition, &[other, &uuid]);
    fixture.directories.wait_for_registration_socket();
    driver.stop();
    umount2(&data, MntFlags::empty()).unwrap();
    fixture.finish();
}

/// The first mount was detached lazily.
#[test]
fn remounted_disk_is_reopened() {
    let (fixture, disk, driver) = Fixture::on_scratch_disk();
    driver.create_volume(create("v", 1 << 20, mount(&[]))).unwrap();

    let mounted = |path: &Path| mountinfo::at(&mountinfo::read().unwrap(), path).unwrap().id;
    let before = mounted(&disk.data);
    umount2(&disk.data, MntFlags::MNT_DETACH).unwrap();
    disk.mount();
    assert_ne!(mounted(&disk.data), before);
    let target = fixture.target("target");
    wait_for_ok(|| {
        driver
            .node_publish_volume(publish("v", &target, mount(&[])))
            .inspect_err(|refused| assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}"))
    });
    fs::write(target.join("file"), "kept").unwrap();

    driver.node_unpublish_volume(unpublish("v", &target)).unwrap();
    driver.delete_volume(delete("v")).unwrap();
    driver.stop();
    drop(disk);
    fixture.finish();
}
