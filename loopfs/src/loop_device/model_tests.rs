//! Tests of the library on a model of the loop driver: races, errnos and crashes at every call.

use std::fs::File;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use nix::errno::Errno;
use rstest::rstest;

use super::*;
use crate::descriptor::reopen;
use crate::error::{ErrorKind, Result};
use crate::flock;
use crate::sys::loop_dev::{FOREIGN, LoopModel, reset, with};
use crate::units::DeviceNumber;

const MIB: u64 = 1 << 20;
/// More calls of the driver than any operation here makes.
const CALLS: usize = 40;

pub(super) fn image() -> File {
    let file = tempfile::NamedTempFile::new().expect("a file");
    // Opened again through /proc, because a temporary file without a name has an access mode of its own.
    let file = file.reopen().expect("the file again");
    file.set_len(MIB).expect("its size");
    file
}

pub(super) fn options() -> AttachOptions {
    // The file system of the temporary files may lack direct I/O.
    AttachOptions::new(Access::ReadWrite).direct_io(DirectIo::Preferred)
}

/// Runs a test on both kinds of kernel: earlier ones unbind a device immediately if only the caller has it open, and later ones wait for
/// the last close.
pub(super) fn old_and_new(test: impl Fn()) {
    for unbinds_at_last_close in [false, true] {
        reset(|model| model.unbinds_at_last_close = unbinds_at_last_close);
        test();
        with(|model| assert!(model.violations.is_empty(), "{:?}", model.violations));
    }
}

/// Another user asked for what this call does not, so the device stays as it is.
#[test]
fn requests_for_different_properties_are_refused() {
    reset(|_| {});
    let image = image();
    let auto_clear = || options().lifetime(Lifetime::AutoClear);
    let larger = || options().block_size(BlockSize::Exact(4096)).direct_io(DirectIo::Off);
    let matching = || options().block_size(BlockSize::MatchDirectIo).direct_io(DirectIo::Off);
    let cases = [
        (options(), auto_clear(), "is persistent"),
        (auto_clear(), options(), "at its last close"),
        (options().label("a"), options().label("b"), "label"),
        (larger(), matching(), "block size"),
    ];
    for (present, requested, problem) in cases {
        let control = LoopControl::open().unwrap();
        let device = control.attach(image.as_fd(), &present).unwrap();
        let before = device.status().unwrap();
        let error = control.ensure_attached(image.as_fd(), &requested).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        assert!(error.to_string().contains(problem), "{error}");
        assert_eq!(device.status().unwrap(), before);
        // The same request, without a label, is met.
        drop(control.ensure_attached(image.as_fd(), &present.label("")).unwrap());
        control.detach(device).unwrap();
    }
}

/// A device of the pool's range and one of another program: a tenant can block its own.
#[test]
fn foreign_devices_fail_no_other_call() {
    // Indices of no other test, because the process remembers which devices do not respond.
    const OF_OTHERS: [u32; 2] = [7000, 7010];
    let problems: [fn(&mut LoopModel); 2] =
        [|model| model.dead_files = OF_OTHERS.into(), |model| model.locked = OF_OTHERS.into()];
    for problem in problems {
        old_and_new(|| {
            with(|model| OF_OTHERS.into_iter().for_each(|index| model.bind_foreign(index)));
            let pool = PoolOptions { range: 7010..7020, keep_idle: 2 };
            let (control, image) = (LoopControl::with_pool(pool).unwrap(), image());
            with(problem);
            // The descriptor is open for writing, so each search queries all devices.
            let device = control.attach(image.as_fd(), &options()).unwrap();
            // A query whose thread is late looks like a device that does not respond.
            let only_others = |listed: &DeviceList| listed.skipped.len() == OF_OTHERS.len();
            let listed = (0..60).map(|_| control.list().unwrap()).find(only_others);
            let listed = listed.expect("only the devices of others are skipped");
            let bindings: Vec<_> = listed.devices.iter().map(|status| &status.binding).collect();
            assert_eq!(bindings, [device.binding()]);
            assert_eq!(control.find(image.as_fd()).unwrap().len(), 1);
            // The next file may be that of the device of another program.
            control.detach(device).unwrap();
            with(|model| {
                model.bind_file(1, image.try_clone().unwrap(), FOREIGN);
                (model.dead_files, model.locked) = ([1].into(), [].into());
            });
            assert_eq!(control.attach(image.as_fd(), &options()).unwrap_err().errno(), Some(libc::EIO));
        });
    }
}

/// A tenant keeps its own device locked.
#[test]
fn a_locked_device_delays_no_search() {
    reset(|_| {});
    let pool = PoolOptions { range: 9100..9110, keep_idle: 2 };
    let (control, image) = (LoopControl::with_pool(pool).unwrap().for_untrusted_programs(), image());
    drop(control.attach(image.as_fd(), &options()).unwrap());
    with(|model| model.locked = [9100].into());
    for _ in 0..2 {
        let errors = [
            control.find(image.as_fd()).unwrap_err(),
            control.ensure_attached(image.as_fd(), &options()).unwrap_err(),
            control.detach_all(image.as_fd()).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::Busy), "{errors:?}");
    }
    with(|model| model.locked.clear());
    let number = DeviceNumber { major: 7, minor: 9100 };
    drop(query::Call::begin(number, flock::DEFAULT_TIMEOUT).unwrap());
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Detached);
}

/// The status of a device cannot be read if the server of its file has ended, or its file system has failed.
#[test]
fn devices_of_dead_files_are_detached() {
    old_and_new(|| {
        let (control, image) = (LoopControl::open().unwrap(), image());
        let device = control.attach(image.as_fd(), &options()).unwrap();
        let index = device.index();
        let user = unmanaged::Device::open_index(index, Access::ReadOnly).unwrap();
        with(|model| model.dead_files = [index].into());
        assert!(matches!(control.detach(device).unwrap(), Detach::Deferred(_)));
        drop(user);
        with(|model| assert!(model.bound().is_empty(), "{:?}", model.bound()));
        with(|model| model.dead_files.clear());
        let device = control.attach(image.as_fd(), &options()).unwrap();
        with(|model| model.dead_files = [device.index()].into());
        assert_eq!(control.detach(device).unwrap(), Detach::Detached);
        with(|model| model.dead_files.clear());
    });
    // Without sequence numbers it may be another attachment by now.
    reset(|model| model.lacks_sequences = true);
    let (control, image) = (LoopControl::open().unwrap(), image());
    let device = control.attach(image.as_fd(), &options()).unwrap();
    with(|model| model.dead_files = [device.index()].into());
    let failed = control.detach(device).unwrap_err();
    assert_eq!(failed.error().errno(), Some(libc::EIO));
    with(|model| model.dead_files.clear());
    assert_eq!(control.detach(failed.into_parts().0).unwrap(), Detach::Detached);
}

#[test]
fn truncated_images_are_attached_read_only() {
    old_and_new(|| {
        let control = LoopControl::open().unwrap();
        let read_only = || AttachOptions::new(Access::ReadOnly).direct_io(DirectIo::Preferred);
        let (attached, new) = (image(), image());
        for options in [read_only(), options()] {
            drop(control.attach(attached.as_fd(), &options).unwrap());
        }
        [&attached, &new].into_iter().for_each(|image| image.set_len(5000).unwrap());
        for image in [&attached, &new] {
            drop(control.ensure_attached(image.as_fd(), &read_only()).unwrap());
            let error = control.ensure_attached(image.as_fd(), &options()).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::WouldShrink | ErrorKind::InvalidInput), "{error}");
            assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Detached);
        }
    });
}

/// A call that detaches the device of an image.
type Call = fn(&LoopControl, &File, LoopDevice) -> Result<()>;

/// Each call that detaches a device.
const DETACHES: [Call; 5] = [
    |control, _, device| {
        drop(control.detach(device)?);
        Ok(())
    },
    |control, image, device| {
        drop(device);
        control.detach_all(image.as_fd()).map(drop)
    },
    |_, _, device| {
        drop(device.detach()?);
        Ok(())
    },
    |_, _, device| unmanaged::Device::open_index(device.index(), Access::ReadOnly)?.detach(),
    // The image is attached again in between.
    |control, image, device| {
        device.detach()?;
        drop(control.ensure_attached(image.as_fd(), &options())?);
        control.detach_all(image.as_fd()).map(drop)
    },
];

#[test]
fn writes_at_any_call_are_kept() {
    for (after, detach) in (0..CALLS).flat_map(|after| DETACHES.map(|detach| (after, detach))) {
        old_and_new(|| {
            let (control, image) = (LoopControl::open().unwrap(), image());
            let device = control.ensure_attached(image.as_fd(), &options()).unwrap();
            with(|model| model.foreign_writes_after = Some(after));
            detach(&control, &image, device).unwrap();
            with(|model| assert!(model.bound().is_empty()));
        });
    }
}

/// An attachment that fails, or is repeated, detaches its device. Another program may have written to it.
#[test]
fn a_failed_attachment_keeps_writes() {
    let changes: [fn(&mut LoopModel); 2] =
        [|model| model.lacks_direct_io = true, |model| model.keeps_discards_disabled = true];
    for (after, change) in (0..CALLS).flat_map(|after| changes.map(|change| (after, change))) {
        old_and_new(|| {
            with(change);
            let (control, image, other) = (LoopControl::open().unwrap(), image(), image());
            // Leaves an idle device whose discards stay disabled.
            drop(control.attach(other.as_fd(), &options().discard(Discard::Disabled)).unwrap());
            control.detach_all(other.as_fd()).unwrap();
            with(|model| model.foreign_writes_after = Some(after));
            let attached = control.attach(image.as_fd(), &options().direct_io(DirectIo::Required));
            drop(attached.map(|device| control.detach(device).unwrap()));
            with(|model| assert!(model.bound().is_empty()));
        });
    }
}

/// The caller repeats the call with the device of the error.
#[rstest]
#[case::not_read("status", Errno::EIO)]
#[case::not_written("write_back", Errno::EIO)]
#[case::too_many_files("open_again", Errno::EMFILE)]
#[case::not_cleared("clear", Errno::EIO)]
fn a_failed_detach_returns_the_device(
    #[case] call: &'static str,
    #[case] errno: Errno,
    #[values(true, false)] tells_pool: bool,
) {
    old_and_new(|| {
        with(|model| model.lacks_sequences = true);
        let (control, image) = (LoopControl::open().unwrap(), image());
        let device = control.attach(image.as_fd(), &options()).unwrap();
        let (binding, path) = (device.binding().clone(), device.path());
        with(|model| drop(model.failures.insert(call, [errno].into())));
        let detach = |device| if tells_pool { control.detach(device) } else { LoopDevice::detach(device) };
        let failed = detach(device).unwrap_err();
        let printed = failed.to_string();
        let (device, error) = failed.into_parts();
        assert_eq!((error.errno(), error.to_string()), (Some(errno as i32), printed));
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        let status = device.status().unwrap();
        assert_eq!(status.binding, binding);
        assert!(!status.auto_clear, "the detach is pending");
        with(|model| model.write(binding.index));
        assert_eq!(detach(device).unwrap(), Detach::Detached);
        with(|model| assert!(model.bound().is_empty()));
    });
}

/// The kernel has accepted the request, so there is nothing to repeat.
#[test]
fn a_detach_is_deferred_unless_verified() {
    old_and_new(|| {
        let (control, image) = (LoopControl::open().unwrap(), image());
        let device = control.attach(image.as_fd(), &options()).unwrap();
        with(|model| drop(model.failures.insert("open", [Errno::EMFILE; 2].into())));
        let Detach::Deferred(pending) = control.detach(device).unwrap() else { panic!("it was opened") };
        let error = pending.clone().wait(Duration::MAX).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EMFILE), "{error}");
        assert_eq!(pending.wait(Duration::ZERO).unwrap(), Detach::Detached);
        with(|model| assert!(model.bound().is_empty()));
    });
}

#[test]
fn a_failed_detach_promises_no_more() {
    old_and_new(|| {
        with(|model| drop(model.failures.insert("write_back", [Errno::EIO].into())));
        let (control, image) = (LoopControl::open().unwrap(), image());
        let device = control.attach(image.as_fd(), &options().lifetime(Lifetime::AutoClear)).unwrap();
        let error = control.detach(device).unwrap_err().to_string();
        assert!(error.contains("at its last close") && !error.contains("stays attached"), "{error}");
        with(|model| assert!(model.bound().is_empty()));
    });
}

/// The call that undoes the attachment fails too.
#[test]
fn a_failed_attachment_names_both_errors() {
    old_and_new(|| {
        with(|model| {
            model.lacks_direct_io = true;
            model.failures.insert("open_again", [Errno::EMFILE].into());
        });
        let (control, image) = (LoopControl::open().unwrap(), image());
        let error = control.attach(image.as_fd(), &options().direct_io(DirectIo::Required)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotHonoured);
        let error = error.to_string();
        assert!(error.contains("direct I/O") && error.contains("EMFILE"), "{error}");
        // The next call finds the device.
        assert_eq!(control.find(image.as_fd()).unwrap().len(), 1);
    });
}

/// Another process takes or removes the device before the library can bind it, five times. The pool returns another index, and a requested
/// one is awaited.
#[rstest]
#[case::taken(Errno::EBUSY, IndexPolicy::Pool)]
#[case::torn_down(Errno::ENXIO, IndexPolicy::Pool)]
#[case::removed(Errno::ENODEV, IndexPolicy::Pool)]
#[case::requested_and_torn_down(Errno::ENXIO, IndexPolicy::Exact(7))]
#[case::requested_and_removed(Errno::ENODEV, IndexPolicy::Exact(7))]
fn a_lost_device_is_replaced(
    #[case] errno: Errno,
    #[case] policy: IndexPolicy,
    #[values("open", "configure")] call: &'static str,
) {
    old_and_new(|| {
        with(|model| drop(model.failures.insert(call, [errno; 5].into())));
        let (control, image) = (LoopControl::open().unwrap(), image());
        let device = control.attach(image.as_fd(), &options().index(policy)).unwrap();
        with(|model| assert_eq!(model.bound().len(), 1));
        assert_eq!(device.index() == 7, policy == IndexPolicy::Exact(7));
        assert_eq!(control.find(image.as_fd()).unwrap()[0].binding(), device.binding());
    });
}

#[test]
fn a_faster_program_keeps_its_device() {
    for after in 0..CALLS {
        old_and_new(|| {
            with(|model| model.foreign_binds_after = Some(after));
            let (control, image) = (LoopControl::open().unwrap(), image());
            let device = control.ensure_attached(image.as_fd(), &options()).unwrap();
            drop(device);
            let before = with(|model| model.bound());
            control.detach_all(image.as_fd()).unwrap();
            let foreign = |bound: Vec<(u32, u64, u32)>| bound.into_iter().filter(|b| b.2 == FOREIGN).count();
            let left = with(|model| model.bound());
            assert!(left.iter().all(|bound| bound.2 == FOREIGN), "{left:?}");
            assert!(foreign(left) >= foreign(before), "a foreign device was detached");
        });
    }
}

/// Attaches and detaches a file while `interrupt` has its effect. The next process recovers.
fn recovers_after(interrupt: impl Fn(&mut LoopModel)) {
    old_and_new(|| {
        with(|model| model.bind_foreign(0));
        let image = image();
        with(&interrupt);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let control = LoopControl::open()?;
            drop(control.ensure_attached(image.as_fd(), &options())?);
            control.detach_all(image.as_fd())?;
            control.ensure_attached(image.as_fd(), &options())
        }));
        with(|model| (model.crash_after, model.error_after) = Default::default());
        let restarted = LoopControl::open().unwrap();
        drop(restarted.ensure_attached(image.as_fd(), &options()).unwrap());
        let ours = with(|model| model.bound()).into_iter().filter(|bound| bound.2 != FOREIGN).count();
        assert_eq!(ours, 1, "after {outcome:?}");
        drop(outcome);
        assert_eq!(restarted.detach_all(image.as_fd()).unwrap(), Detach::Detached);
        with(|model| assert_eq!(model.bound().len(), 1, "the foreign one"));
        restarted.remove_idle(0);
        with(|model| assert!(model.exist().len() <= 2, "idle devices were forgotten: {:?}", model.exist()));
    });
}

#[test]
fn crashes_at_any_call_are_recovered() {
    for after in 0..CALLS {
        recovers_after(|model| model.crash_after = Some(after));
    }
}

#[test]
fn errors_of_any_call_are_recovered() {
    for after in 0..CALLS {
        recovers_after(|model| model.error_after = Some(after));
    }
}

/// Runs on three kernels: one enables discards with each binding, one keeps them disabled until they are enabled, and one keeps
/// them disabled until the device is removed.
#[test]
fn discards_follow_last_request_after_crash() {
    let kernels = [(true, false), (false, false), (false, true)];
    for (after, (forgets, keeps)) in (0..CALLS).flat_map(|after| kernels.map(|kernel| (after, kernel))) {
        old_and_new(|| {
            with(|model| (model.forgets_discard_limits, model.keeps_discards_disabled) = (forgets, keeps));
            let (disabled, enabled) = (image(), image());
            let disabling = || options().discard(Discard::Disabled).index(IndexPolicy::Exact(5));
            let enabling = || options().index(IndexPolicy::Exact(5));
            with(|model| model.crash_after = Some(after));
            let crashed = catch_unwind(AssertUnwindSafe(|| {
                let control = LoopControl::open().unwrap();
                drop(control.ensure_attached(disabled.as_fd(), &disabling()).unwrap());
            }));
            with(|model| model.crash_after = None);
            let control = LoopControl::open().unwrap();
            let device = control.ensure_attached(disabled.as_fd(), &disabling()).unwrap();
            let discard = device.discard().unwrap();
            assert_eq!(discard, Discard::Disabled, "after a crash at call {after} ({:?})", crashed.is_err());
            // To cancel the detach, LOOP_SET_STATUS64 is called, which enables discards on earlier kernels.
            let Detach::Deferred(pending) = control.detach_all(disabled.as_fd()).unwrap() else {
                panic!("held")
            };
            drop(pending.cancel().unwrap());
            let again = control.ensure_attached(disabled.as_fd(), &disabling()).unwrap();
            assert_eq!(again.discard().unwrap(), Discard::Disabled);
            drop((device, again));
            assert_eq!(control.detach_all(disabled.as_fd()).unwrap(), Detach::Detached);
            let device = control.attach(enabled.as_fd(), &enabling()).unwrap();
            assert_eq!(device.discard().unwrap(), Discard::Enabled);
        });
    }
}

/// The kernel keeps discards disabled until the device is removed, so the library waits until no process has it open.
#[test]
fn enabling_discards_recreates_the_index() {
    old_and_new(|| {
        with(|model| model.keeps_discards_disabled = true);
        let control = LoopControl::with_pool(PoolOptions { range: 10..13, keep_idle: 3 }).unwrap();
        let (disabled, enabled) = (image(), image());
        let index = control.attach(disabled.as_fd(), &options().discard(Discard::Disabled)).unwrap().index();
        assert_eq!(control.detach_all(disabled.as_fd()).unwrap(), Detach::Detached);
        // As udev does, but for longer than the deadline.
        let user = crate::sys::loop_dev::open_device(index, false).unwrap();
        let hurried = options().index(IndexPolicy::Exact(index)).deadline(Duration::ZERO);
        assert_eq!(control.attach(enabled.as_fd(), &hurried).unwrap_err().kind(), ErrorKind::Busy);
        // No second one.
        let error = control.ensure_attached(enabled.as_fd(), &hurried).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        assert!(matches!(control.detach_all(enabled.as_fd()).unwrap(), Detach::Deferred(_)));
        drop(user);
        with(|model| assert!(model.bound().is_empty()));

        let exact = options().index(IndexPolicy::Exact(index));
        let device = control.attach(enabled.as_fd(), &exact).unwrap();
        assert_eq!((device.index(), device.discard().unwrap()), (index, Discard::Enabled));
        // A device in use is left unchanged.
        discard::set(&device, index, Discard::Disabled).unwrap();
        assert_eq!(control.ensure_attached(enabled.as_fd(), &options()).unwrap().binding(), device.binding());
        assert_eq!(control.detach(device).unwrap(), Detach::Detached);
        let device = control.attach(enabled.as_fd(), &options()).unwrap();
        assert_eq!(device.discard().unwrap(), Discard::Enabled);
        with(|model| assert_eq!(model.bound().len(), 1));
    });
}

#[rstest]
#[case::not_kept(|model: &mut LoopModel| model.ignores_discard_limits = true, ErrorKind::NotHonoured)]
#[case::read_only(
    |model: &mut LoopModel| drop(model.failures.insert("set_discard_limit", [Errno::EROFS; 2].into())),
    ErrorKind::ReadOnly
)]
#[case::no_sysfs(
    |model: &mut LoopModel| drop(model.failures.insert("set_discard_limit", [Errno::ENOENT; 2].into())),
    ErrorKind::NotFound
)]
fn undisabled_discards_leave_nothing_attached(
    #[case] change: fn(&mut LoopModel),
    #[case] expected: ErrorKind,
) {
    reset(change);
    let (control, image) = (LoopControl::open().unwrap(), image());
    let error = control.attach(image.as_fd(), &options().discard(Discard::Disabled)).unwrap_err();
    assert_eq!(error.kind(), expected, "{error}");
    with(|model| assert!(model.bound().is_empty()));
    // An attachment that needs no change of discards is not affected.
    assert!(control.attach(image.as_fd(), &options()).is_ok());
}

#[rstest]
#[case::of_the_pool(IndexPolicy::Pool, Duration::ZERO)]
#[case::free(IndexPolicy::Any, Duration::from_secs(1))]
fn busy_devices_are_retried_with_pauses(#[case] policy: IndexPolicy, #[case] deadline: Duration) {
    let tries = || {
        with(|model| {
            model.calls.remove("configure");
            model.failures.insert("configure", [Errno::EBUSY; 10_000].into());
        });
        let (control, image) = (LoopControl::open().unwrap(), image());
        let options = options().index(policy).deadline(deadline);
        let error = control.attach(image.as_fd(), &options).unwrap_err();
        assert_eq!((error.kind(), error.errno()), (ErrorKind::Busy, Some(libc::EBUSY)), "{error}");
        with(|model| assert!(model.bound().is_empty()));
        let tries = with(|model| model.calls["configure"]);
        // The pauses are 1, 2, 4, 8, 16, 32 and then 50 ms.
        assert!(tries <= 27, "{tries} tries");
        tries
    };
    old_and_new(|| {
        // A thread that is late tries once, whatever its deadline.
        let retries = (0..5).any(|_| tries() > 1);
        assert_eq!(retries, !deadline.is_zero());
    });
}

/// The file can grow during the call, so the device may have the size of the file before or after it.
#[rstest]
#[case::grew_before_the_size_was_read(MIB, MIB + 4096, true)]
#[case::is_smaller_than_the_file_was(2 * MIB, MIB, false)]
fn a_wrong_device_size_is_refused(#[case] before: u64, #[case] bound: u64, #[case] granted: bool) {
    reset(|model| model.size_when_bound = Some(bound));
    let (control, image) = (LoopControl::open().unwrap(), image());
    image.set_len(before).unwrap();
    let outcome = control.attach(image.as_fd(), &options());
    assert_eq!(
        outcome.map_err(|error| error.kind()).map(drop),
        if granted { Ok(()) } else { Err(ErrorKind::NotHonoured) }
    );
}

#[test]
fn waiting_for_a_lock_times_out() {
    reset(|_| {});
    let (control, image) = (LoopControl::open().unwrap(), image());
    let hurried = options().deadline(Duration::from_millis(20));
    let assert_busy = |remedy: &str| {
        let error = control.attach(image.as_fd(), &hurried).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(error.remedy().is_some_and(|text| text.contains(remedy)), "{error}");
    };
    let by_a_thread = exclusion::Exclusion::lock(image.as_fd(), Duration::ZERO).unwrap();
    assert_busy("lslocks");
    drop(by_a_thread);
    let own = reopen(image.as_fd(), nix::fcntl::OFlag::O_RDONLY).unwrap();
    let by_the_caller = flock::exclusive(own, Duration::ZERO, "test the lock").unwrap();
    assert_busy("pass the descriptor of this process");
    drop(by_the_caller);
    control.attach(image.as_fd(), &hurried).unwrap();
}
