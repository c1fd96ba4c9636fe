//! Which indices the pool finds idle again, against the model of the driver.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use nix::errno::Errno;
use rstest::rstest;

use super::binding::Access;
use super::control::LoopControl;
use super::detach::Detach;
use super::device::LoopDevice;
use super::discard::Discard;
use super::model_tests::{image, old_and_new, options};
use super::options::AttachOptions;
use super::pool::PoolOptions;
use super::unmanaged;
use crate::error::ErrorKind;
use crate::sys::loop_dev::{self, reset, with};

fn small_pool() -> LoopControl {
    LoopControl::with_pool(PoolOptions { range: 10..13, keep_idle: 3 }).unwrap()
}

/// A file that no process has open for writing: attaching it queries no device.
fn unwritten_image() -> File {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, [0; 4096]).unwrap();
    File::open(file.into_temp_path()).unwrap()
}

fn attach_all(control: &LoopControl, images: &[File], options: &AttachOptions) -> Vec<LoopDevice> {
    images.iter().map(|image| control.attach(image.as_fd(), options).unwrap()).collect()
}

#[test]
fn indices_that_failed_are_reused() {
    for errno in [Errno::EBUSY, Errno::ENXIO, Errno::ENODEV] {
        old_and_new(|| {
            with(|model| drop(model.failures.insert("configure", [errno; 2].into())));
            drop(attach_all(&small_pool(), &[image(), image(), image()], &options()));
        });
    }
}

#[test]
fn indices_of_removed_devices_are_reused() {
    old_and_new(|| {
        let (control, images) = (small_pool(), [image(), image(), image()]);
        // The second round attaches idle devices, and the third one adds removed devices again.
        for keep in [3, 0, 0] {
            drop(attach_all(&control, &images, &options()));
            let full = control.attach(image().as_fd(), &options()).unwrap_err();
            assert_eq!(full.kind(), ErrorKind::NoSpace, "{full}");
            for image in &images {
                assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Detached);
            }
            assert_eq!(control.remove_idle(keep), 3 - keep);
        }
    });
}

#[test]
fn devices_are_removed_without_threads() {
    reset(|model| (10..13).for_each(|index| model.add_idle(index)));
    let control = small_pool();
    with(|model| drop(model.failures.insert("spawn", [Errno::EAGAIN].into())));
    assert_eq!(control.remove_idle(0), 3);
    with(|model| assert_eq!(model.failures["spawn"], []));
}

/// One process only attaches and another one detaches: the first finds the idle devices long before the range is used up.
#[test]
fn idle_devices_limit_added_devices() {
    old_and_new(|| {
        let control = LoopControl::with_pool(PoolOptions { range: 1000..9000, keep_idle: 8 }).unwrap();
        let image = image();
        for _ in 0..1000 {
            let device = control.attach(image.as_fd(), &options()).unwrap();
            assert_eq!(device.detach().unwrap(), Detach::Detached);
        }
        // The adds between two scans double each time: 64, 128, 256 and 512 devices. The background thread removes surplus ones
        // in between, but may be late.
        let exist = with(|model| model.exist().len());
        assert!(exist <= 512, "{exist} devices for one file at a time");
    });
}

#[test]
fn deferred_devices_are_removed_once_detached() {
    old_and_new(|| {
        let (control, images) = (small_pool(), [image(), image(), image()]);
        let mut held = attach_all(&control, &images, &options());
        for image in &images {
            assert!(matches!(control.detach_all(image.as_fd()).unwrap(), Detach::Deferred(_)));
        }
        let last = held.pop();
        drop(held);
        assert_eq!(control.remove_idle(0), 2, "one of three is still open");
        drop(last);
        assert_eq!(control.remove_idle(0), 1);
        with(|model| assert!(model.exist().is_empty(), "{:?}", model.exist()));
    });
}

#[test]
fn thin_volumes_avoid_devices_without_discards() {
    reset(|model| (model.unbinds_at_last_close, model.keeps_discards_disabled) = (true, true));
    let (control, image) = (small_pool(), image());
    let (thin, thick) = (options(), options().discard(Discard::Disabled));
    let attached = |options: &AttachOptions| {
        let device = control.attach(image.as_fd(), options).unwrap();
        let index = device.index();
        control.detach(device).unwrap();
        index
    };
    for _ in 0..2 {
        assert_eq!(attached(&thick), 10);
        assert_eq!(attached(&thin), 11);
    }
    with(|model| assert_eq!(model.calls.get("remove"), None));
    // All three are idle, and none suits.
    control.remove_idle(0);
    let all = [image.try_clone().unwrap(), super::model_tests::image(), super::model_tests::image()];
    for device in attach_all(&control, &all, &thick) {
        control.detach(device).unwrap();
    }
    attached(&thin);
    with(|model| assert!(model.violations.is_empty(), "{:?}", model.violations));
}

#[test]
fn indices_of_mounted_nodes_are_unused() {
    old_and_new(|| {
        with(|model| {
            // One exists and is idle, one is closing, and one was removed.
            model.mounted = [10, 12].into();
            model.bind_foreign(10);
            model.unbind_all([10]);
        });
        let (control, images) = (small_pool(), [image(), image()]);
        assert_eq!(control.attach(images[0].as_fd(), &options()).unwrap().index(), 11);
        let full = control.attach(images[1].as_fd(), &options()).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::NoSpace, "{full}");
        // The next process scans the range again.
        with(|model| model.mounted.clear());
        let next = small_pool().attach(images[1].as_fd(), &options());
        assert!(next.is_ok_and(|device| [10, 12].contains(&device.index())));
    });
}

/// A tenant has passed a descriptor of the device to a process that outlives it.
#[test]
fn open_devices_are_unused() {
    let unbind: [fn(); 3] = [
        // The scan of the next process finds it.
        || with(|model| model.add_idle(10)),
        // It exists when the pool adds its index.
        || drop(small_pool().attach(image().as_fd(), &options()).map(LoopDevice::detach)),
        // Its detach was deferred.
        || {
            let (control, image) = (small_pool(), image());
            let device = control.attach(image.as_fd(), &options()).unwrap();
            let user = LoopDevice::open_index(10).unwrap();
            assert!(matches!(control.detach(device).unwrap(), Detach::Deferred(_)));
            drop(user);
        },
    ];
    for unbind in unbind {
        old_and_new(|| {
            unbind();
            let kept = unmanaged::Device::open_index(10, Access::ReadWrite).unwrap();
            let (control, images) = (small_pool(), [image(), image(), image()]);
            let devices = attach_all(&control, &images[..2], &options());
            assert!(devices.iter().all(|device| device.index() != 10), "{devices:?}");
            let full = control.attach(images[2].as_fd(), &options()).unwrap_err();
            assert_eq!(full.kind(), ErrorKind::NoSpace, "{full}");
            drop(kept);
            assert_eq!(control.attach(images[2].as_fd(), &options()).unwrap().index(), 10);
            with(|model| assert!(model.calls["remove"] >= 1));
        });
    }
}

/// Earlier kernels unbind a device for the only process that has it open, although that process keeps it open.
#[test]
fn a_user_detached_device_stays_unused() {
    reset(|_| {});
    let (control, image) = (small_pool(), image());
    let device = control.attach(image.as_fd(), &options()).unwrap();
    let user = unmanaged::Device::open_index(10, Access::ReadWrite).unwrap();
    with(|model| model.foreign_unbinds_at_close = true);
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    assert_ne!(control.attach(image.as_fd(), &options()).unwrap().index(), 10);
    drop(user);
}

/// Another process with the same range has published the device in the meantime, and its tenant has unbound it.
#[test]
fn a_device_bound_elsewhere_stays_unused() {
    reset(|model| model.unbinds_at_last_close = true);
    let (control, image) = (small_pool(), image());
    control.detach(control.attach(image.as_fd(), &options()).unwrap()).unwrap();
    with(|model| {
        model.bind_foreign(10);
        model.unbind_all([10]);
        model.mounted = [10].into();
    });
    assert_ne!(control.attach(image.as_fd(), &options()).unwrap().index(), 10);
}

/// The mount table is read when the index is added, and not only by the scan before.
#[test]
fn nodes_mounted_after_scans_are_skipped() {
    old_and_new(|| {
        let (control, images) = (small_pool(), [image(), image()]);
        assert_eq!(control.attach(images[0].as_fd(), &options()).unwrap().index(), 10);
        with(|model| model.mounted = [11].into());
        assert_eq!(control.attach(images[1].as_fd(), &options()).unwrap().index(), 12);
    });
}

/// A tenant keeps an unbound device locked. The removal of others goes on.
#[test]
fn locked_devices_delay_no_removal() {
    reset(|model| (9200..9203).for_each(|index| model.add_idle(index)));
    let control = LoopControl::with_pool(PoolOptions { range: 9200..9203, keep_idle: 0 }).unwrap();
    with(|model| model.locked = [9201].into());
    assert_eq!(control.remove_idle(0), 2);
    let images = [image(), image(), image()];
    let devices = attach_all(&control, &images[..2], &options());
    for _ in 0..2 {
        let full = control.attach(images[2].as_fd(), &options()).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::NoSpace, "{full}");
    }
    drop(devices);
    with(|model| model.locked.clear());
}

/// One call removes all idle devices of the range, and another one needs one of them in the meantime.
#[test]
fn concurrent_removals_are_awaited() {
    reset(|model| (10..13).for_each(|index| model.add_idle(index)));
    let control = Arc::new(small_pool());
    with(|model| model.locked = (10..13).collect());
    let added = || with(|model| model.calls.get("add").copied().unwrap_or_default());
    let (sender, results) = channel();
    for _ in 0..2 {
        let (control, sender, before) = (Arc::clone(&control), sender.clone(), added());
        let attach =
            move || drop(sender.send(control.attach(unwritten_image().as_fd(), &options()).map(drop)));
        loop_dev::spawn("attach", attach).unwrap();
        // It has found that each index has a device.
        while added() < before + 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    with(|model| model.locked.clear());
    drop(sender);
    results.iter().for_each(|attached| attached.unwrap());
}

/// Another process removes all idle devices, and it takes a while until their indices are free.
#[test]
fn removals_of_others_are_awaited() {
    old_and_new(|| {
        let control = small_pool();
        with(|model| {
            (10..13).for_each(|index| model.add_idle(index));
            model.failures.insert("remove", [Errno::ENODEV; 9].into());
        });
        drop(control.attach(image().as_fd(), &options()).unwrap());
        with(|model| assert_eq!(model.failures["remove"], []));
    });
}

#[test]
fn the_pool_opens_no_other_device() {
    old_and_new(|| {
        with(|model| (10..13).for_each(|index| model.bind_foreign(index)));
        let control = small_pool();
        let before = with(|model| model.calls.get("open").copied().unwrap_or_default());
        let reader = unwritten_image();
        let full = control.attach(reader.as_fd(), &options()).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::NoSpace, "{full}");
        assert_eq!(control.idle(), 0);
        assert_eq!(with(|model| model.calls.get("open").copied().unwrap_or_default()), before);
    });
}

#[rstest]
#[case::no_partitions(0, 0x1_0000..0x2_0000)]
#[case::seven(7, 0x1_0000..0x2_0000)]
#[case::eight(8, 0x8000..0x1_0000)]
#[case::fifteen(15, 0x8000..0x1_0000)]
#[case::most(255, 0x800..0x1000)]
fn the_default_range_fits_max_part(#[case] max_part: u32, #[case] range: Range<u32>) {
    reset(|model| model.max_part = max_part);
    assert_eq!(PoolOptions::default().range, range);
    let index = LoopControl::open().unwrap().attach(image().as_fd(), &options()).unwrap().index();
    assert_eq!(index, range.start);
}

#[test]
fn an_excessive_range_names_max_part() {
    reset(|model| model.max_part = 15);
    let error = LoopControl::with_pool(PoolOptions { range: 0xffff..0x1_0001, keep_idle: 0 }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("max_part") && error.to_string().contains("65535"), "{error}");
    assert!(LoopControl::with_pool(PoolOptions { range: 0xffff..0x1_0000, keep_idle: 0 }).is_ok());
}

#[test]
fn a_range_without_indices_is_refused() {
    reset(|_| {});
    let error = LoopControl::with_pool(PoolOptions { range: 5..5, keep_idle: 0 }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("PoolOptions::range"), "{error}");
}
