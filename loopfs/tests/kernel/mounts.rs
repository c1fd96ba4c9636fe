use std::fs::{self, File};
use std::os::fd::AsFd;

use loopfs::ErrorKind;
use loopfs::loop_device::{Access, AttachOptions, Detach, LoopControl};
use loopfs::mount::{AccessTime, MountFlags, bind_mount, table as mountinfo, unmount};
use loopfs::volume_store::{StoreOptions, VolumeStore};
use nix::mount::{MntFlags, umount2};

use crate::environment::{Leaks, directory, image, scratch, xfs};

#[test]
fn a_bind_mount_has_its_own_flags_and_not_those_of_the_source() {
    let leaks = Leaks::watch();
    // The source is mounted nosuid, nodev and noexec.
    let (source, target) = (directory(), scratch());
    let flags = MountFlags {
        read_only: true,
        nosuid: true,
        access_time: AccessTime::Never,
        nodiratime: true,
        ..MountFlags::default()
    };
    let opened = File::open(source.path()).unwrap();
    bind_mount(opened.as_fd(), target.path(), flags).unwrap();
    let mounts = mountinfo::read().unwrap();
    let mount = mountinfo::at(&mounts, target.path()).unwrap();
    for (option, expected) in [
        ("ro", true),
        ("nosuid", true),
        ("nodev", false),
        ("noexec", false),
        ("noatime", true),
        ("nodiratime", true),
    ] {
        assert_eq!(mount.has_option(option), expected, "{option} in {:?}", mount.options);
    }
    let refused = File::create(target.path().join("file")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    File::create(source.path().join("file")).unwrap();
    assert!(target.path().join("file").exists());
    assert!(unmount(target.path()).unwrap());
    leaks.check();
}

#[test]
fn unmounting_is_idempotent_and_removes_stacked_mounts() {
    let leaks = Leaks::watch();
    let (source, target) = (directory(), scratch());
    let opened = File::open(source.path()).unwrap();
    for _ in 0..2 {
        bind_mount(opened.as_fd(), target.path(), MountFlags::default()).unwrap();
    }
    assert!(unmount(target.path()).unwrap());
    assert!(!unmount(target.path()).unwrap());
    assert!(!unmount(&target.path().join("absent")).unwrap());
    leaks.check();
}

#[test]
fn unmounting_a_busy_mount_fails_and_leaves_it_mounted() {
    let (source, target) = (directory(), scratch());
    File::create(source.path().join("file")).unwrap();
    bind_mount(File::open(source.path()).unwrap().as_fd(), target.path(), MountFlags::default()).unwrap();
    let user = File::open(target.path().join("file")).unwrap();
    assert_eq!(unmount(target.path()).unwrap_err().kind(), loopfs::ErrorKind::Busy);
    drop(user);
    assert!(unmount(target.path()).unwrap());
}

#[test]
fn a_block_device_is_published_by_bind_mounting_its_node() {
    let leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", 1 << 20);
    let device = control.ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    // The directory is on a file system that is mounted nodev. The flag belongs to the mount, and the bind
    // mount is another mount.
    let target = directory.path().join("device");
    File::create(&target).unwrap();
    bind_mount(
        File::open(device.path()).unwrap().as_fd(),
        &target,
        MountFlags { nosuid: true, ..MountFlags::default() },
    )
    .unwrap();
    assert_eq!(File::open(&target).unwrap().metadata().unwrap().len(), 0, "the target is a device node");
    assert_eq!(loopfs::loop_device::LoopDevice::open_path(&target).unwrap().binding(), device.binding());
    assert!(unmount(&target).unwrap());
    drop(device);
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Detached);
    leaks.check();
}

#[test]
fn a_store_whose_file_system_was_mounted_again_fails_verification_until_it_is_opened_again() {
    let leaks = Leaks::watch();
    let scratch = scratch();
    let data = scratch.path().join("data");
    fs::create_dir(&data).unwrap();
    let mount = || {
        let root = File::open(xfs()).unwrap();
        bind_mount(root.as_fd(), &data, MountFlags::default()).unwrap();
    };
    mount();
    let open = || VolumeStore::open(&data, StoreOptions::default()).unwrap();
    let store = open();
    store.verify().unwrap();
    umount2(&data, MntFlags::MNT_DETACH).unwrap();
    mount();
    let error = store.verify().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotMounted, "{error}");
    assert!(error.to_string().contains("mounted again"), "{error}");
    drop(store);
    open().verify().unwrap();
    assert!(unmount(&data).unwrap());
    leaks.check();
}
