use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Barrier;
use std::time::Duration;

use loopfs::loop_device::{
    Access, AttachOptions, Binding, BlockSize, Detach, DirectIo, IndexPolicy, LoopControl, LoopDevice,
    PoolOptions,
};
use loopfs::mount::{MountFlags, bind_mount, unmount};
use loopfs::{Bytes, ErrorKind};
use rstest::rstest;

use crate::environment::{Leaks, MIB, directory, image, loop_devices, scratch, wait_until};
use crate::fixtures::{TestImage, assert_fails, concurrently};

/// Writes, and does not call fsync(2), as most programs do.
fn write_at(path: &std::path::Path, offset: u64, data: &[u8]) -> std::io::Result<()> {
    let mut device = File::options().write(true).open(path)?;
    device.seek(SeekFrom::Start(offset))?;
    device.write_all(data)
}

/// Writes to the file of a device, which is read in the meantime.
fn write_through(path: &std::path::Path, offset: u64, data: &[u8]) {
    write_at(path, offset, data).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
}

fn read_at(path: &std::path::Path, offset: u64, length: usize) -> Vec<u8> {
    let mut device = File::open(path).expect("the device");
    device.seek(SeekFrom::Start(offset)).expect("seek");
    let mut data = vec![0; length];
    device.read_exact(&mut data).expect("read");
    data
}

#[test]
fn the_kernel_reports_the_requested_properties() {
    let TestImage { control, directory, image, .. } = &TestImage::new(MIB);
    let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let status = device.status().unwrap();
    assert!(status.direct_io);
    assert!(!status.auto_clear);
    assert_eq!((status.size, status.block_size), (Bytes(MIB), 512));
    assert_eq!(status.binding.access, Access::ReadWrite);

    write_through(&device.path(), 4096, b"through the device");
    assert_eq!(read_at(&directory.path().join("image"), 4096, 18), b"through the device");
    // This test holds the device open.
    assert!(matches!(control.detach_all(image).unwrap(), Detach::Deferred(_)));
    drop(device);
    assert!(control.find(image).unwrap().is_empty());
}

#[rstest]
#[case::buffered(DirectIo::Off, BlockSize::Exact(512), &[512], false)]
#[case::preferred(DirectIo::Preferred, BlockSize::Exact(512), &[512], true)]
#[case::large_blocks(DirectIo::Required, BlockSize::Exact(4096), &[4096], true)]
#[case::blocks_of_the_file(DirectIo::Required, BlockSize::MatchDirectIo, &[512, 4096], true)]
#[case::blocks_of_the_kernel(DirectIo::Required, BlockSize::KernelDefault, &[512, 4096], true)]
fn devices_follow_the_requested_options(
    #[case] direct_io: DirectIo,
    #[case] requested: BlockSize,
    #[case] block_sizes: &[u32],
    #[case] granted: bool,
) {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite).direct_io(direct_io).block_size(requested);
    let status = control.ensure_attached(image, &options).unwrap().status().unwrap();
    assert_eq!(status.direct_io, granted);
    assert!(block_sizes.contains(&status.block_size), "{status:?}");
}

#[rstest]
#[case(0)]
#[case(513)]
#[case(8192)]
fn an_invalid_block_size_is_refused(#[case] block_size: u32) {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite).block_size(BlockSize::Exact(block_size));
    assert_fails(control.ensure_attached(image, &options), ErrorKind::InvalidInput);
    assert!(control.find(image).unwrap().is_empty());
}

#[test]
fn attaching_again_returns_the_same_device() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    let first = control.ensure_attached(image, &options).unwrap().binding().clone();
    // This control acts as another process or as the process after a restart. Only the kernel's state is
    // shared.
    let restarted = LoopControl::open().unwrap();
    assert_eq!(restarted.ensure_attached(image, &options).unwrap().binding(), &first);
    let other = options.block_size(BlockSize::Exact(4096));
    assert_fails(restarted.ensure_attached(image, &other), ErrorKind::AlreadyExists);
    assert_eq!(restarted.detach_all(image).unwrap(), Detach::Detached);
    assert_eq!(restarted.detach_all(image).unwrap(), Detach::Detached, "detaching again succeeds");
}

/// A new file with the old name is not mistaken for the image.
#[test]
fn a_renamed_image_is_found() {
    let TestImage { control, directory, image: original, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    let bound = control.ensure_attached(original, &options).unwrap().binding().clone();
    std::fs::rename(directory.path().join("image"), directory.path().join("moved")).unwrap();
    let impostor = image(directory.path(), "image", MIB);
    assert!(control.find(&impostor).unwrap().is_empty());
    assert_eq!(control.find(original).unwrap()[0].binding(), &bound);
}

/// A writable device of the same file is attached at the same time.
#[test]
fn a_read_only_device_refuses_writes() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let writable = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let readable = control.ensure_attached(image, &AttachOptions::new(Access::ReadOnly)).unwrap();
    assert_ne!(writable.index(), readable.index());
    assert!(write_at(&readable.path(), 0, &[1; 512]).is_err());
    write_through(&writable.path(), 0, &[7; 512]);
    assert_eq!(read_at(&readable.path(), 0, 512), [7; 512]);
}

#[test]
fn the_capacity_only_follows_growth() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    image.set_len(4 * MIB).unwrap();
    assert_eq!(device.status().unwrap().size, Bytes(MIB));
    for _ in 0..2 {
        assert_eq!(device.refresh_capacity(image).unwrap(), Bytes(4 * MIB));
    }
    image.set_len(2 * MIB).unwrap();
    assert_eq!(device.refresh_capacity(image).unwrap_err().kind(), ErrorKind::WouldShrink);
    assert_eq!(device.status().unwrap().size, Bytes(4 * MIB));
}

#[test]
fn a_reused_index_is_another_binding() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let (first, second) = (image(directory.path(), "first", MIB), image(directory.path(), "second", MIB));
    let options = AttachOptions::new(Access::ReadWrite);
    let stale = control.ensure_attached(&first, &options).unwrap().binding().clone();
    assert_eq!(control.detach_all(&first).unwrap(), Detach::Detached);
    // The pool reuses no index at once before Linux 6.11, because a process might have the device open.
    let options = options.index(IndexPolicy::Exact(stale.index));
    let reused = control.ensure_attached(&second, &options).unwrap();
    assert_fails(LoopDevice::open_binding(&stale), ErrorKind::NotFound);
    assert_eq!(control.detach_all(&first).unwrap(), Detach::Detached);
    assert!(reused.status().is_ok(), "detaching the old file took the new device");
    drop(reused);
    assert_eq!(control.detach_all(&second).unwrap(), Detach::Detached);
}

/// The kernel detaches the device at its last close.
#[test]
fn an_open_device_detaches_later() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let holder = File::open(device.path()).unwrap();
    let Detach::Deferred(pending) = device.detach().unwrap() else { panic!("the device is open") };
    assert!(control.find(image).unwrap()[0].status().unwrap().auto_clear);
    let Detach::Deferred(pending) = pending.wait(Duration::ZERO).unwrap() else {
        panic!("the device is open")
    };
    drop(holder);
    assert_eq!(pending.wait(Duration::from_secs(60)).unwrap(), Detach::Detached);
    assert!(control.find(image).unwrap().is_empty());
}

/// The kernel does not tell whose request it is: another user may have attached the file until its last close.
#[test]
fn attaching_cancels_no_deferred_detach() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    let device = control.ensure_attached(image, &options).unwrap();
    let binding = device.binding().clone();
    let holder = File::open(device.path()).unwrap();
    drop(device);
    assert!(matches!(control.detach_all(image).unwrap(), Detach::Deferred(_)));
    let error = control.ensure_attached(image, &options).unwrap_err();
    assert!(error.kind() == ErrorKind::AlreadyExists && error.to_string().contains("cancel"), "{error}");
    LoopDevice::open_binding(&binding).unwrap().cancel_detach().unwrap();
    let again = control.ensure_attached(image, &options).unwrap();
    assert_eq!(again.binding(), &binding);
    drop((holder, again));
    assert_eq!(control.find(image).unwrap()[0].binding(), &binding, "the last close detached the device");
}

/// Another process expanded the file, and died before it refreshed the device.
#[test]
fn an_attached_device_gets_its_size() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    drop(control.attach(image, &options).unwrap());
    image.set_len(2 * MIB).unwrap();
    let device = control.ensure_attached(image, &options).unwrap();
    assert_eq!(device.status().unwrap().size.0, 2 * MIB);
    image.set_len(MIB).unwrap();
    assert_fails(control.ensure_attached(image, &options), ErrorKind::WouldShrink);
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);
}

/// The caller's own lock and lease are of its open file description.
#[test]
fn the_callers_lock_and_lease_stay() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    drop(image(directory.path(), "image", MIB));
    let path = directory.path().join("image");
    let reader = File::open(&path).unwrap();
    reader.lock().unwrap();
    let options = AttachOptions::new(Access::ReadOnly);
    let device = control.attach(&reader, &options).unwrap();
    control.ensure_attached(&reader, &options).unwrap();
    control.detach(device).unwrap();
    control.detach_all(&reader).unwrap();
    let other = File::open(&path).unwrap();
    assert!(other.try_lock().is_err(), "the lock was dropped");
    reader.unlock().unwrap();
}

#[test]
fn path_number_and_index_open_devices() {
    let TestImage { control, directory, image, .. } = &TestImage::new(MIB);
    let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let number = device.device_number().unwrap();
    assert_eq!(LoopDevice::open_path(&device.path()).unwrap().binding(), device.binding());
    assert_eq!(LoopDevice::open_device_number(number).unwrap().binding(), device.binding());
    assert_eq!(LoopDevice::open_index(device.index()).unwrap().binding(), device.binding());
    assert_eq!(LoopDevice::open_path(directory.path()).unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn unavailable_direct_io_leaves_nothing_attached() {
    let _leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let scratch = scratch();
    let image = image(scratch.path(), "image", MIB);
    // Whether tmpfs accepts O_DIRECT depends on the kernel; it does from Linux 6.6 on. In both cases
    // attaching returns a device with direct I/O or an error, and `Prefer` always succeeds.
    match control.ensure_attached(&image, &AttachOptions::new(Access::ReadWrite)) {
        Ok(device) => assert!(device.status().unwrap().direct_io),
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotHonoured, "{error}"),
    }
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
    let preferred = AttachOptions::new(Access::ReadWrite).direct_io(DirectIo::Preferred);
    drop(control.ensure_attached(&image, &preferred).unwrap());
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
}

#[test]
fn concurrent_attachments_share_one_device() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    for _ in 0..20 {
        let start = Barrier::new(2);
        // Each thread acts as another process.
        let bindings = concurrently(2, || {
            let own = LoopControl::open().unwrap();
            start.wait();
            own.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap().binding().clone()
        });
        assert_eq!(bindings[0], bindings[1]);
        assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);
    }
}

#[test]
fn idle_devices_are_removed_on_request() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let images: Vec<_> = (0..6).map(|n| image(directory.path(), &format!("image-{n}"), MIB)).collect();
    for image in &images {
        drop(control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap());
    }
    for image in &images {
        assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);
    }
    let idle = control.idle();
    assert!(idle >= images.len());
    let existing = loop_devices().len();
    // A slow removal goes on in the background.
    assert!(control.remove_idle(2) <= idle - 2);
    assert_eq!(control.idle(), 2);
    wait_until(|| loop_devices().len() <= existing - (idle - 2));
    control.remove_idle(0);
    wait_until(|| loop_devices().len() <= existing - idle);
}

#[test]
fn attaching_another_part_conflicts() {
    let TestImage { control, directory, image, .. } = &TestImage::new(4 * MIB);
    let part =
        AttachOptions::new(Access::ReadWrite).offset(MIB).size_limit(NonZeroU64::new(2 * MIB).unwrap());
    let device = control.attach(image, &part).unwrap();
    assert_eq!(device.status().unwrap().size, Bytes(2 * MIB));
    write_through(&device.path(), 0, &[9; 512]);
    assert_eq!(read_at(&directory.path().join("image"), MIB, 512), [9; 512]);
    let whole = AttachOptions::new(Access::ReadWrite);
    assert_eq!(control.ensure_attached(image, &whole).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(control.attach(image, &part).unwrap_err().kind(), ErrorKind::AlreadyExists);
    drop(device);
    assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);

    let unaligned = AttachOptions::new(Access::ReadWrite).offset(100);
    assert_eq!(control.attach(image, &unaligned).unwrap_err().kind(), ErrorKind::InvalidInput);
    let beyond = AttachOptions::new(Access::ReadWrite).offset(8 * MIB);
    assert_eq!(control.attach(image, &beyond).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert!(control.find(image).unwrap().is_empty());
}

#[test]
fn a_stored_binding_is_one_attachment() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    let stored = control.attach(image, &options).unwrap().binding().to_string();
    let binding: Binding = stored.parse().unwrap();
    assert!(binding.disk_sequence.is_some(), "Linux 5.15 has BLKGETDISKSEQ");
    assert_eq!(LoopDevice::open_binding(&binding).unwrap().binding(), &binding);
    assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);
    assert_eq!(LoopDevice::open_binding(&binding).unwrap_err().kind(), ErrorKind::NotFound);
    let again = control.attach(image, &options).unwrap();
    assert_ne!(again.binding().disk_sequence, binding.disk_sequence);
    assert_eq!(LoopDevice::open_binding(&binding).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_requested_index_is_used() {
    let TestImage { control, directory, image, .. } = &TestImage::new(MIB);
    let exact = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Exact(40_000));
    let device = control.attach(image, &exact).unwrap();
    assert_eq!(device.index(), 40_000);
    let other = self::image(directory.path(), "other", MIB);
    assert_eq!(control.attach(&other, &exact).unwrap_err().kind(), ErrorKind::Busy);
    drop(device);
    assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);
    let any = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Any);
    assert!(control.attach(image, &any).unwrap().index() < 65536, "as low as other programs' devices");
}

/// A bind mount of the node does not have the device open. The mount must not show the file that is attached next.
#[test]
fn a_mounted_node_shows_one_file() {
    let _leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let [alice, bob] = ["alice", "bob"].map(|name| image(directory.path(), name, MIB));
    let options = AttachOptions::new(Access::ReadWrite);
    let device = control.attach(&alice, &options).unwrap();
    let index = device.index();
    let target = directory.path().join("target");
    File::create(&target).unwrap();
    let node = File::options().read(true).custom_flags(libc::O_PATH).open(device.path()).unwrap();
    bind_mount(&node, &target, MountFlags::default()).unwrap();
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);

    let next = control.attach(&bob, &options).unwrap();
    write_at(&next.path(), 0, &[1; 512]).unwrap();
    assert_ne!(next.index(), index);
    assert!(fs::read(&target).unwrap_or_default().is_empty());
    assert!(unmount(&target).unwrap());
    assert_eq!(control.detach(next).unwrap(), Detach::Detached);
}

/// At the same time, another program takes the lowest free devices.
#[test]
fn thirty_two_threads_attach_distinct_devices() {
    const THREADS: usize = 32;
    const ROUNDS: usize = 3;
    let _leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let foreign = image(directory.path(), "foreign", MIB);
    let any = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Any);
    let start = Barrier::new(THREADS + 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Other programs request the lowest free index in the same way, again and again.
            let others = LoopControl::with_pool(PoolOptions { range: 0..1, keep_idle: 0 }).unwrap();
            start.wait();
            for round in 0..THREADS * ROUNDS / 4 {
                let device = others.attach(&foreign, &any).unwrap();
                write_at(&device.path(), 0, &[round as u8; 512]).unwrap();
                // No other thread or program has used or detached the device.
                assert_eq!(read_at(&device.path(), 0, 512), [round as u8; 512]);
                let binding = device.binding().clone();
                drop(device);
                LoopDevice::open_binding(&binding).unwrap();
                if let Detach::Deferred(pending) = others.detach_all(&foreign).unwrap() {
                    assert_eq!(pending.wait(Duration::from_secs(60)).unwrap(), Detach::Detached);
                }
            }
        });
        for thread in 0..THREADS {
            let (control, start, directory) = (&control, &start, directory.path());
            scope.spawn(move || {
                let image = image(directory, &format!("image-{thread}"), MIB);
                start.wait();
                for round in 0..ROUNDS {
                    let device =
                        control.ensure_attached(&image, &AttachOptions::new(Access::ReadWrite)).unwrap();
                    write_at(&device.path(), 0, &[(thread + round) as u8; 512]).unwrap();
                    drop(device);
                    if let Detach::Deferred(pending) = control.detach_all(&image).unwrap() {
                        assert_eq!(pending.wait(Duration::from_secs(60)).unwrap(), Detach::Detached);
                    }
                    let content = read_at(&directory.join(format!("image-{thread}")), 0, 512);
                    assert_eq!(content, [(thread + round) as u8; 512]);
                }
            });
        }
    });
}
