//! Tests that provoke the errors of loop devices, mounts and the store and check their messages. Those of
//! quotas are in `quota_refusals`.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use loopfs::loop_device::{Access, AttachOptions, Detach, DirectIo, LoopControl, LoopDevice};
use loopfs::mount::{MountFlags, bind_mount, table as mountinfo, unmount};
use loopfs::volume_store::{StoreOptions, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, DeviceNumber, ErrorKind};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{major, minor};

use crate::disk::{Disk, MIN_SIZE, mkfs};
use crate::environment::{
    Leaks, MIB, clone_image, directory, id, image, linux_at_least, scratch, snapshot_id, store, xfs,
};
use crate::fixtures::{TestImage, TestStore, assert_fails, assert_refused};
use crate::namespaces::in_namespace;
use crate::quota_refusals::run_without_capabilities;

const READ_WRITE: Access = Access::ReadWrite;

/// Runs `work` while an empty tmpfs, which is read-only, covers `path`, in a mount namespace that lasts as long as its thread.
pub(crate) fn with_covered<T: Send>(path: &str, work: impl FnOnce() -> T + Send) -> T {
    let nothing =
        |path: &str| mount(Some("none"), path, Some("tmpfs"), MsFlags::MS_RDONLY, None::<&str>).unwrap();
    in_namespace(|| {
        nothing(path);
        work()
    })
}

#[test]
fn loop_control_needs_its_node() {
    let opened = with_covered("/dev", LoopControl::open);
    let error = assert_refused(opened, ErrorKind::NotFound, Some(Errno::ENOENT));
    assert!(error.to_string().contains("load the loop module"), "no remedy in: {error}");
}

#[test]
fn listing_devices_without_sysfs_fails() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let absent = Some(Errno::ENOENT);
    assert_refused(with_covered("/sys", || control.list()), ErrorKind::NotFound, absent);
    assert_refused(with_covered("/sys", || control.find(image)), ErrorKind::NotFound, absent);
}

#[test]
fn the_mount_table_needs_proc() {
    assert_refused(with_covered("/proc", mountinfo::read), ErrorKind::NotFound, Some(Errno::ENOENT));
}

#[test]
fn operations_without_capabilities_are_refused() {
    let Some(owned) = run_without_capabilities() else { return };
    let denied = ErrorKind::PermissionDenied;
    assert_refused(LoopControl::open(), denied, Some(Errno::EACCES));
    let source = File::open(&owned).unwrap();
    assert_refused(bind_mount(&source, &owned, MountFlags::default()), denied, Some(Errno::EPERM));
    assert_refused(unmount(&xfs()), denied, Some(Errno::EPERM));
    assert_eq!(VolumeStore::open(&xfs(), StoreOptions::default()).unwrap_err().kind(), denied);
}

#[test]
fn attaching_an_unsuitable_file_fails() {
    let _leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let options = AttachOptions::new(READ_WRITE).direct_io(DirectIo::Off);
    let is_directory = File::open(directory.path()).unwrap();
    assert_refused(control.attach(&is_directory, &options), ErrorKind::InvalidInput, None);
    let terminal = File::options().read(true).write(true).open("/dev/null").unwrap();
    assert_refused(control.attach(&terminal, &options), ErrorKind::InvalidInput, None);
    drop(is_directory);

    // A file on a read-only mount can only be attached read-only.
    image(directory.path(), "image", MIB);
    let read_only = scratch();
    let flags = MountFlags { read_only: true, ..MountFlags::default() };
    bind_mount(File::open(directory.path()).unwrap(), read_only.path(), flags).unwrap();
    let image = File::open(read_only.path().join("image")).unwrap();
    assert_refused(control.attach(&image, &options), ErrorKind::ReadOnly, Some(Errno::EROFS));
    let device = control.attach(&image, &AttachOptions::new(Access::ReadOnly)).unwrap();
    assert_eq!(control.find(&image).unwrap()[0].binding(), device.binding());
    drop(device);
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
    drop(image);
    assert!(unmount(read_only.path()).unwrap());
}

#[test]
fn a_label_is_truncated_between_characters() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(READ_WRITE).label(&"ä".repeat(40));
    assert_eq!(control.attach(image, &options).unwrap().status().unwrap().label, "ä".repeat(31));
    assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);
    let nul = AttachOptions::new(READ_WRITE).label("a\0b");
    assert_refused(control.attach(image, &nul), ErrorKind::InvalidInput, None);
}

/// Only attached loop devices can be opened.
#[test]
fn opening_other_devices_fails() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let device = control.attach(image, &AttachOptions::new(READ_WRITE)).unwrap();
    let (index, number, path) = (device.index(), device.device_number().unwrap(), device.path());
    assert_eq!(device.detach().unwrap(), Detach::Detached);
    let absent = ErrorKind::NotFound;
    // The index is free and its device was never created.
    assert_refused(LoopDevice::open_index(index), absent, None);
    assert_refused(LoopDevice::open_device_number(number), absent, None);
    assert_refused(LoopDevice::open_path(&path), absent, None);
    assert_refused(LoopDevice::open_index(0xf_fff0), absent, Some(Errno::ENOENT));
    let never = DeviceNumber { major: 4000, minor: 1 };
    assert_refused(LoopDevice::open_device_number(never), absent, Some(Errno::ENOENT));
    assert_refused(LoopDevice::open_path(Path::new("/dev/absent")), absent, Some(Errno::ENOENT));
    // These are devices of other types.
    assert_refused(LoopDevice::open_path(Path::new("/dev/null")), ErrorKind::InvalidInput, None);
    let disk = disk();
    let raw = std::fs::metadata(&disk).unwrap().rdev();
    let number = DeviceNumber { major: major(raw) as u32, minor: minor(raw) as u32 };
    assert_refused(LoopDevice::open_path(&disk), absent, None);
    assert_refused(LoopDevice::open_device_number(number), absent, None);
}

/// Returns the path of a block device that is not a loop device.
fn disk() -> PathBuf {
    let names = std::fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().file_name());
    let other = names.map(|name| name.into_string().unwrap()).find(|name| !name.starts_with("loop"));
    let path = Path::new("/dev").join(other.expect("the disk that the tests run on"));
    assert!(std::fs::metadata(&path).unwrap().file_type().is_block_device());
    path
}

#[test]
fn a_foreign_file_refreshes_no_capacity() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let (image, other) = (image(directory.path(), "image", MIB), image(directory.path(), "other", 2 * MIB));
    let device = control.attach(&image, &AttachOptions::new(READ_WRITE)).unwrap();
    assert_refused(device.refresh_capacity(&other), ErrorKind::InvalidInput, None);
    assert_eq!(device.status().unwrap().size, Bytes(MIB));
    drop(device);
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
}

/// Also checks a device that another process holds exclusively, as a mount does. Linux 6.19 then refuses
/// every change of the device; Linux 7.3 does not.
#[test]
fn a_deferred_detach_can_be_cancelled() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(READ_WRITE);
    for exclusively in [false, true] {
        let device = control.attach(image, &options).unwrap();
        let binding = device.binding().clone();
        let flags = if exclusively { libc::O_EXCL } else { 0 };
        let holder = File::options().read(true).custom_flags(flags).open(device.path()).unwrap();
        let Detach::Deferred(pending) = device.detach().unwrap() else { panic!("the device is open") };
        assert_eq!(pending.bindings(), std::slice::from_ref(&binding));
        if exclusively && linux_at_least(6, 19) && !linux_at_least(7, 3) {
            assert_refused(pending.clone().cancel(), ErrorKind::Busy, Some(Errno::EBUSY));
            drop(holder);
            assert_eq!(pending.wait(Duration::from_secs(60)).unwrap(), Detach::Detached);
            continue;
        }
        let kept = pending.clone().cancel().unwrap();
        assert_eq!(kept.iter().map(LoopDevice::binding).collect::<Vec<_>>(), [&binding]);
        drop((holder, kept));
        assert!(LoopDevice::open_binding(&binding).is_ok(), "the last close detached the device");
        assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);
        assert!(pending.cancel().unwrap().is_empty(), "cancelling too late is not an error");
    }
}

#[test]
fn mounting_on_an_unsuitable_target_fails() {
    let _leaks = Leaks::watch();
    let (source, target) = (directory(), scratch());
    let opened = File::open(source.path()).unwrap();
    let at = |name: &str| target.path().join(name);
    File::create(at("file")).unwrap();
    std::fs::create_dir(at("directory")).unwrap();
    symlink(at("directory"), at("link")).unwrap();
    let mount = |source: &File, target: &Path| bind_mount(source, target, MountFlags::default());
    let invalid = ErrorKind::InvalidInput;
    assert_refused(mount(&opened, &at("absent")), ErrorKind::NotFound, Some(Errno::ENOENT));
    assert_refused(mount(&opened, &at("file")), invalid, Some(Errno::EINVAL));
    assert_refused(mount(&File::open(at("file")).unwrap(), &at("directory")), invalid, Some(Errno::EINVAL));
    assert_refused(mount(&opened, &at("link")), invalid, Some(Errno::EINVAL));
    assert_refused(mount(&opened, &at("file/below")), invalid, Some(Errno::ENOTDIR));
    assert_refused(mount(&opened, Path::new("/tmp/a\0b")), invalid, None);

    // Unmounting the symbolic link leaves its target mounted.
    mount(&opened, &at("directory")).unwrap();
    assert!(!unmount(&at("link")).unwrap());
    assert!(unmount(&at("directory")).unwrap());
}

/// The volume is absent or has the wrong kind.
#[test]
fn unsuitable_volumes_are_refused() {
    let store = TestStore::open();
    let absent = id("absent");
    assert_refused(store.expand(&absent, Bytes(MIB)), ErrorKind::NotFound, None);
    assert_refused(store.stats(&absent), ErrorKind::NotFound, None);
    let (block, filesystem) = (id("block"), id("filesystem"));
    let image = store.create(&block, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    let directory = store.create(&filesystem, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    assert_refused(image.open_dir(), ErrorKind::InvalidInput, None);
    assert_refused(directory.open_image(READ_WRITE), ErrorKind::InvalidInput, None);
    for id in [&block, &filesystem] {
        assert_refused(store.expand(id, Bytes(u64::MAX)), ErrorKind::InvalidInput, None);
    }
}

#[test]
fn a_read_only_store_refuses_changes() {
    let block = id("block");
    let spec = VolumeSpec::new(VolumeKind::Block, Bytes(MIB));
    store().create(&block, &spec).unwrap();
    // Only the mount becomes read-only and not the file system, so no other part of the machine is affected.
    let remount = |flags| {
        let nothing = None::<&str>;
        let keep = MsFlags::MS_BIND | MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        mount(nothing, &xfs(), nothing, MsFlags::MS_REMOUNT | keep | flags, nothing).unwrap();
    };
    remount(MsFlags::MS_RDONLY);
    let outcome = std::panic::catch_unwind(|| {
        let store = store();
        assert_refused(store.verify(), ErrorKind::ReadOnly, None);
        let read_only = (ErrorKind::ReadOnly, Some(Errno::EROFS));
        assert_refused(store.volume(&block).unwrap().open_image(READ_WRITE), read_only.0, read_only.1);
        assert_refused(store.create(&id("new"), &spec), read_only.0, read_only.1);
        assert_refused(clone_image(&store, &block, &id("new"), Bytes(MIB)), read_only.0, read_only.1);
        let snapshot = snapshot_id("new");
        assert_refused(store.create_snapshot(&block, &snapshot), read_only.0, read_only.1);
        assert_refused(store.expand(&block, Bytes(2 * MIB)), read_only.0, read_only.1);
        assert_refused(store.delete(&block), read_only.0, read_only.1);
        assert_eq!(store.stats(&block).unwrap().capacity, Bytes(MIB));
    });
    remount(MsFlags::empty());
    outcome.unwrap();
    let store = store();
    store.verify().unwrap();
    assert!(store.delete(&block).unwrap());
    store.empty_trash().unwrap();
}

#[test]
fn another_filesystem_is_refused_by_name() {
    let tmpfs = std::env::var_os("LOOPFS_TEST_SCRATCH").unwrap();
    let error = assert_fails(
        VolumeStore::open(Path::new(&tmpfs), StoreOptions::default()),
        ErrorKind::WrongFilesystem,
    );
    assert!(error.to_string().contains("tmpfs"), "{error}");
}

#[test]
fn a_store_refuses_short_project_ids() {
    let _leaks = Leaks::watch();
    let (disk, target) = (Disk::blank(MIN_SIZE), scratch());
    mkfs(&["-m", "crc=0", "-i", "projid32bit=0"], &disk.path);
    disk.mount(target.path());
    let error =
        assert_fails(VolumeStore::open(target.path(), StoreOptions::default()), ErrorKind::WrongFilesystem);
    assert!(error.to_string().contains("16 bits"), "{error}");
    assert!(unmount(target.path()).unwrap());
}
