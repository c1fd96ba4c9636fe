use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::sync::Barrier;

use loopfs::{Access, AttachOptions, Bytes, Detach, DirectIo, ErrorKind, LoopControl, LoopDevice};
use rstest::rstest;

use crate::environment::{Leaks, directory, image, scratch};

const MIB: u64 = 1 << 20;

fn write_at(path: &std::path::Path, offset: u64, data: &[u8]) -> std::io::Result<()> {
    let mut device = File::options().write(true).open(path)?;
    device.seek(SeekFrom::Start(offset))?;
    device.write_all(data)?;
    device.sync_all()
}

fn read_at(path: &std::path::Path, offset: u64, length: usize) -> Vec<u8> {
    let mut device = File::open(path).expect("the device");
    device.seek(SeekFrom::Start(offset)).expect("seek");
    let mut data = vec![0; length];
    device.read_exact(&mut data).expect("read");
    data
}

#[test]
fn what_is_asked_is_what_the_kernel_reports() {
    let leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let device = control.ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    let status = device.status().unwrap();
    assert!(status.direct_io);
    assert!(!status.auto_clear);
    assert_eq!((status.size, status.block_size), (Bytes(MIB), 512));
    assert_eq!(status.binding.access, Access::ReadWrite);

    write_at(&device.path(), 4096, b"through the device").unwrap();
    assert_eq!(read_at(&directory.path().join("image"), 4096, 18), b"through the device");
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Deferred, "it is held open here");
    drop(device);
    assert!(control.find(image.as_fd()).unwrap().is_empty());
    leaks.check();
}

#[rstest]
#[case::buffered(DirectIo::Off, 512, false)]
#[case::preferred(DirectIo::Prefer, 512, true)]
#[case::large_blocks(DirectIo::Require, 4096, true)]
fn direct_io_and_block_size_follow_the_options(
    #[case] direct_io: DirectIo,
    #[case] block_size: u32,
    #[case] granted: bool,
) {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let options = AttachOptions { direct_io, block_size, ..AttachOptions::new(Access::ReadWrite) };
    let status = control.ensure_attached(image.as_fd(), &options).unwrap().status().unwrap();
    assert_eq!((status.direct_io, status.block_size), (granted, block_size));
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
}

#[rstest]
#[case(0)]
#[case(513)]
#[case(8192)]
fn a_block_size_that_cannot_be_is_refused(#[case] block_size: u32) {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let options = AttachOptions { block_size, ..AttachOptions::new(Access::ReadWrite) };
    let error = control.ensure_attached(image.as_fd(), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(control.find(image.as_fd()).unwrap().is_empty());
}

#[test]
fn attaching_again_answers_the_same_device() {
    let leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    let first = control.ensure_attached(image.as_fd(), &options).unwrap().binding().clone();
    // Another process, and after a restart: nothing is remembered but what the kernel has.
    let restarted = LoopControl::open().unwrap();
    assert_eq!(restarted.ensure_attached(image.as_fd(), &options).unwrap().binding(), &first);
    let other = AttachOptions { block_size: 4096, ..options };
    let error = restarted.ensure_attached(image.as_fd(), &other).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    assert_eq!(restarted.detach_all(image.as_fd()).unwrap(), Detach::Gone);
    assert_eq!(restarted.detach_all(image.as_fd()).unwrap(), Detach::Gone, "repeated");
    leaks.check();
}

#[test]
fn a_renamed_image_is_found_and_a_new_file_of_its_name_is_not_it() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let original = image(directory.path(), "image", MIB);
    let bound = control
        .ensure_attached(original.as_fd(), &AttachOptions::new(Access::ReadWrite))
        .unwrap()
        .binding()
        .clone();
    std::fs::rename(directory.path().join("image"), directory.path().join("moved")).unwrap();
    let impostor = image(directory.path(), "image", MIB);
    assert!(control.find(impostor.as_fd()).unwrap().is_empty());
    assert_eq!(control.find(original.as_fd()).unwrap()[0].binding(), &bound);
    assert_eq!(control.detach_all(original.as_fd()).unwrap(), Detach::Gone);
}

#[test]
fn a_read_only_device_refuses_writes_beside_a_writable_one() {
    let leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let writable = control.ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    let readable = control.ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadOnly)).unwrap();
    assert_ne!(writable.index(), readable.index());
    assert!(write_at(&readable.path(), 0, &[1; 512]).is_err());
    write_at(&writable.path(), 0, &[7; 512]).unwrap();
    assert_eq!(read_at(&readable.path(), 0, 512), [7; 512]);
    drop((writable, readable));
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
    leaks.check();
}

#[test]
fn capacity_follows_the_file_up_and_never_down() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let device = control.ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    image.set_len(4 * MIB).unwrap();
    assert_eq!(device.status().unwrap().size, Bytes(MIB));
    assert_eq!(device.refresh_capacity(&image).unwrap(), Bytes(4 * MIB));
    assert_eq!(device.refresh_capacity(&image).unwrap(), Bytes(4 * MIB), "repeated");
    image.set_len(2 * MIB).unwrap();
    assert_eq!(device.refresh_capacity(&image).unwrap_err().kind(), ErrorKind::WouldShrink);
    assert_eq!(device.status().unwrap().size, Bytes(4 * MIB));
    drop(device);
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
}

#[test]
fn a_reused_index_is_not_taken_for_the_old_device() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let (first, second) = (image(directory.path(), "first", MIB), image(directory.path(), "second", MIB));
    let options = AttachOptions::new(Access::ReadWrite);
    let stale = control.ensure_attached(first.as_fd(), &options).unwrap().binding().clone();
    assert_eq!(control.detach_all(first.as_fd()).unwrap(), Detach::Gone);
    let reused = loop {
        let device = control.ensure_attached(second.as_fd(), &options).unwrap();
        if device.index() == stale.index {
            break device;
        }
        drop(device);
        assert_eq!(control.detach_all(second.as_fd()).unwrap(), Detach::Gone);
    };
    let error = LoopDevice::open_binding(&stale).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(control.detach_all(first.as_fd()).unwrap(), Detach::Gone);
    assert!(reused.status().is_ok(), "detaching the old file took the new device");
    drop(reused);
    assert_eq!(control.detach_all(second.as_fd()).unwrap(), Detach::Gone);
}

#[test]
fn the_same_file_attached_after_a_detach_is_another_binding() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    let first = control.ensure_attached(image.as_fd(), &options).unwrap().binding().clone();
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
    let second = control.ensure_attached(image.as_fd(), &options).unwrap().binding().clone();
    assert_ne!(first.disk_sequence, second.disk_sequence);
    assert_eq!(LoopDevice::open_binding(&first).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
}

#[test]
fn a_device_that_is_open_elsewhere_goes_at_its_last_close() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let device = control.ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    let holder = File::open(device.path()).unwrap();
    assert_eq!(device.detach().unwrap(), Detach::Deferred);
    assert!(control.find(image.as_fd()).unwrap()[0].status().unwrap().auto_clear);
    drop(holder);
    assert!(control.find(image.as_fd()).unwrap().is_empty());
}

#[test]
fn attaching_takes_back_a_deferred_detach() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    let device = control.ensure_attached(image.as_fd(), &options).unwrap();
    let binding = device.binding().clone();
    let holder = File::open(device.path()).unwrap();
    drop(device);
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Deferred);
    let again = control.ensure_attached(image.as_fd(), &options).unwrap();
    assert_eq!(again.binding(), &binding);
    drop((holder, again));
    assert_eq!(control.find(image.as_fd()).unwrap()[0].binding(), &binding, "it went at the last close");
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
}

#[test]
fn devices_open_by_path_number_and_index_alike() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let device = control.ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    let number = device.device_number().unwrap();
    assert_eq!(LoopDevice::open_path(&device.path()).unwrap().binding(), device.binding());
    assert_eq!(LoopDevice::open_device_number(number).unwrap().binding(), device.binding());
    assert_eq!(LoopDevice::open_index(device.index()).unwrap().binding(), device.binding());
    assert_eq!(LoopDevice::open_path(directory.path()).unwrap_err().kind(), ErrorKind::InvalidInput);
    drop(device);
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
}

#[test]
fn direct_io_that_cannot_be_had_is_an_error_and_leaves_nothing() {
    let leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let scratch = scratch();
    let image = image(scratch.path(), "image", MIB);
    // Whether tmpfs takes O_DIRECT depends on the kernel (it does from Linux 6.6 on); whichever
    // way, the answer is a device with direct I/O or an error, and Prefer always succeeds.
    match control.ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadWrite)) {
        Ok(device) => assert!(device.status().unwrap().direct_io),
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotHonoured, "{error}"),
    }
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
    let preferred = AttachOptions { direct_io: DirectIo::Prefer, ..AttachOptions::new(Access::ReadWrite) };
    drop(control.ensure_attached(image.as_fd(), &preferred).unwrap());
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
    leaks.check();
}

#[test]
fn threads_that_attach_and_detach_do_not_meet() {
    const THREADS: usize = 8;
    const ROUNDS: usize = 25;
    let leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let start = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (control, start, directory) = (&control, &start, directory.path());
            scope.spawn(move || {
                let image = image(directory, &format!("image-{thread}"), MIB);
                let pattern = [thread as u8 + 1; 512];
                start.wait();
                for _ in 0..ROUNDS {
                    let device = control
                        .ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadWrite))
                        .unwrap();
                    write_at(&device.path(), 0, &pattern).unwrap();
                    drop(device);
                    // Deferred where another thread is just looking at the device.
                    control.detach_all(image.as_fd()).unwrap();
                }
                assert_eq!(read_at(&directory.join(format!("image-{thread}")), 0, 512), pattern);
            });
        }
    });
    leaks.check();
}

#[test]
fn two_processes_that_attach_one_file_get_one_device() {
    let controls = [LoopControl::open().unwrap(), LoopControl::open().unwrap()];
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    for _ in 0..20 {
        let start = Barrier::new(2);
        let bindings: Vec<_> = std::thread::scope(|scope| {
            let attach = |control| {
                let (image, start) = (&image, &start);
                scope.spawn(move || {
                    start.wait();
                    let options = AttachOptions::new(Access::ReadWrite);
                    LoopControl::ensure_attached(control, image.as_fd(), &options).unwrap().binding().clone()
                })
            };
            let workers: Vec<_> = controls.iter().map(attach).collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect()
        });
        assert_eq!(bindings[0], bindings[1]);
        assert_eq!(controls[0].detach_all(image.as_fd()).unwrap(), Detach::Gone);
    }
}

#[test]
fn idle_devices_are_removed_on_request() {
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let images: Vec<_> = (0..6).map(|n| image(directory.path(), &format!("image-{n}"), MIB)).collect();
    for image in &images {
        drop(control.ensure_attached(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap());
    }
    for image in &images {
        assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Gone);
    }
    let idle = control.idle();
    assert!(idle >= images.len());
    assert_eq!(control.trim(2), idle - 2);
    assert_eq!(control.idle(), 2);
    assert_eq!(control.trim(0), 2);
}
