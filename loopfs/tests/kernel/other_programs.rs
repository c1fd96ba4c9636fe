//! Tests with programs that use loop devices without this library.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use loopfs::loop_device::{
    Access, AttachOptions, Detach, IndexPolicy, LoopControl, LoopDevice, PoolOptions, unmanaged,
};
use loopfs::volume_store::{VolumeKind, VolumeSpec};
use loopfs::{Bytes, ErrorKind, test_support};
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MsFlags, mount, umount};

use crate::environment::{Leaks, MIB, directory, id, image};
use crate::fixtures::{TestImage, TestStore, assert_fails};

fn detach(index: u32) {
    assert_eq!(LoopDevice::open_index(index).unwrap().detach().unwrap(), Detach::Detached);
}

/// The image of a volume is tracked from its creation on. The library must still find the attachment of
/// another program.
#[test]
fn a_losetup_device_prevents_writable_ones() {
    let (store, id) = (TestStore::open(), id("tenant"));
    let volume = store.create(&id, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    let theirs =
        test_support::bind_as_another_program(volume.open_image(Access::ReadWrite).unwrap()).unwrap();
    let control = LoopControl::open().unwrap();
    let image = volume.open_image(Access::ReadOnly).unwrap();
    let options = AttachOptions::new(Access::ReadWrite);
    let error = assert_fails(control.attach(&image, &options), ErrorKind::AlreadyExists);
    assert!(error.to_string().contains(&format!("/dev/loop{theirs}")), "{error}");
    // The device of losetup uses the page cache, which is not the requested direct I/O.
    assert_eq!(control.ensure_attached(&image, &options).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(control.find(&image).unwrap()[0].index(), theirs);
    // The check also works if a read-only device of the library is attached.
    let read_only = control.attach(&image, &AttachOptions::new(Access::ReadOnly)).unwrap();
    assert_eq!(control.attach(&image, &options).unwrap_err().kind(), ErrorKind::AlreadyExists);
    drop(read_only);
    // The device of the other program is detached as well.
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
    assert!(control.find(&image).unwrap().is_empty());

    // A descriptor that is open for writing but belongs to no device does not prevent attaching.
    let writer = volume.open_image(Access::ReadWrite).unwrap();
    for image in [image.as_fd(), writer.as_fd()] {
        drop(control.attach(image, &options).unwrap());
        assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);
    }
}

/// While a program has a device open exclusively, `LOOP_CTL_GET_FREE` returns that device again and again.
/// The library retries with pauses, in which another program gets the lock of the loop control.
#[test]
fn retries_do_not_block_other_programs() {
    let _leaks = Leaks::watch();
    let directory = directory();
    let (image, foreign) = (image(directory.path(), "image", MIB), image(directory.path(), "foreign", MIB));
    let control = LoopControl::open().unwrap();
    let index = test_support::bind_as_another_program(&foreign).unwrap();
    detach(index);
    let path = format!("/dev/loop{index}");
    let holder = File::options().read(true).custom_flags(libc::O_EXCL).open(path).unwrap();
    let any = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Any).deadline(Duration::from_secs(60));
    std::thread::scope(|scope| {
        let attach = scope.spawn(|| control.attach(&image, &any));
        // systemd takes a free device in the same way. Only afterwards can the device be bound.
        let loops = File::options().read(true).write(true).open("/dev/loop-control").unwrap();
        // An attempt has the lock.
        while let Ok(unused) = Flock::lock(loops.try_clone().unwrap(), FlockArg::LockExclusiveNonblock) {
            assert!(!attach.is_finished());
            unused.unlock().unwrap();
        }
        let turn = Flock::lock(loops, FlockArg::LockExclusive).map_err(|(_, errno)| errno).unwrap();
        drop(holder);
        drop(turn);
        assert_eq!(attach.join().unwrap().unwrap().index(), index);
    });
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
}

/// The node has the number of another device, and the library must not bind that one.
#[test]
fn a_wrong_device_node_is_refused() {
    let TestImage { control, directory, image, .. } = &TestImage::new(MIB);
    let other = crate::environment::image(directory.path(), "other", MIB);
    let exact = |index| AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Exact(index));
    // Creates both devices and leaves them idle.
    for index in [50_000, 50_001] {
        let device = control.attach(image, &exact(index)).unwrap();
        assert_eq!(device.detach().unwrap(), Detach::Detached);
    }
    let nothing = None::<&str>;
    mount(Some("/dev/loop50001"), "/dev/loop50000", nothing, MsFlags::MS_BIND, nothing).unwrap();
    let attached = control.attach(image, &exact(50_000)).map(drop);
    let bound = LoopDevice::open_index(50_001).map(drop);
    let opened = unmanaged::Device::open_index(50_000, Access::ReadWrite).map(drop);
    // With a file at the device of the node, the status names that device.
    let other = control.attach(&other, &exact(50_001));
    let status = LoopDevice::open_index(50_000).map(drop);
    umount("/dev/loop50000").unwrap();
    for (result, cause) in [
        (attached, "the node has the number 7:50001"),
        (opened, "the node has the number 7:50001"),
        (status, "the node belongs to loop50001"),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(&format!("/dev/loop50000: {cause}")), "{error}");
    }
    assert!(control.find(image).unwrap().is_empty());
    assert_eq!(bound.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(control.detach(other.unwrap()).unwrap(), Detach::Detached);
}

#[test]
fn a_wrong_node_selects_another_device() {
    let _leaks = Leaks::watch();
    let directory = directory();
    let [image, other] = ["image", "other"].map(|name| image(directory.path(), name, MIB));
    let control = LoopControl::with_pool(PoolOptions { range: 50_010..50_012, keep_idle: 2 }).unwrap();
    let options = AttachOptions::new(Access::ReadWrite);
    // Creates both devices and leaves them idle.
    let first = control.attach(&image, &options).unwrap();
    let second = control.attach(&other, &options).unwrap();
    let (stale, good) = (first.index().min(second.index()), first.index().max(second.index()));
    for device in [first, second] {
        assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    }
    // Not the node of the good one: a mounted node keeps its index out of the pool.
    unmanaged::add(50_012).unwrap();
    let (nothing, node) = (None::<&str>, format!("/dev/loop{stale}"));
    mount(Some("/dev/loop50012"), node.as_str(), nothing, MsFlags::MS_BIND, nothing).unwrap();
    let indices = [(); 2].map(|()| {
        let device = control.attach(&image, &options)?;
        let index = device.index();
        assert_eq!(control.detach(device)?, Detach::Detached);
        Ok::<_, loopfs::Error>(index)
    });
    // Before Linux 6.11 the pool removes the device, and with it the node and the mount.
    let still_mounted = loopfs::mount::unmount(node.as_ref()).unwrap();
    unmanaged::remove(50_012).unwrap();
    for index in indices {
        assert!(index.unwrap() == good || !still_mounted);
    }
}

/// A tenant can have the kubelet mount a file of any name as a subPath of its volume.
/// The file has the name of a device node, and the pool still uses that index.
#[test]
fn a_mounted_files_name_is_ignored() {
    let _leaks = Leaks::watch();
    let directory = directory();
    let control = LoopControl::with_pool(PoolOptions { range: 50_020..50_021, keep_idle: 1 }).unwrap();
    let [image, _target] = ["image", "target"].map(|name| image(directory.path(), name, MIB));
    let (nothing, named) = (None::<&str>, tempfile::tempdir_in("/run").unwrap());
    let (file, target_path) = (named.path().join("loop50020"), directory.path().join("target"));
    File::create_new(&file).unwrap();
    mount(Some(&file), &target_path, nothing, MsFlags::MS_BIND, nothing).unwrap();
    let attached = control.attach(&image, &AttachOptions::new(Access::ReadWrite));
    let index = attached.map(|device| {
        let index = device.index();
        control.detach(device).map(|_| index)
    });
    umount(&target_path).unwrap();
    assert_eq!(index.unwrap().unwrap(), 50_020);
    control.remove_idle(0);
}
