//! How a file's device is known: by a lock of the descriptor that the device keeps.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use loopfs::ErrorKind;
use loopfs::loop_device::{Access, AttachOptions, Detach, LoopControl, LoopDevice};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use rstest::rstest;

use crate::environment::{Leaks, directory, image};
use crate::refusals::with_covered;

const MIB: u64 = 1 << 20;

/// What stands in the way of a lock on all of a file past 4 EiB: where it begins, if anything does.
fn lock_past_the_end(file: &File) -> Option<i64> {
    let mut found = whole(libc::F_WRLCK);
    found.l_start = 1 << 62;
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut found)).unwrap();
    (i32::from(found.l_type) != libc::F_UNLCK).then_some(found.l_start)
}

fn whole(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

#[rstest]
fn the_kernel_keeps_the_lock_as_long_as_the_device_has_the_file(
    #[values(Access::ReadWrite, Access::ReadOnly)] access: Access,
) {
    let leaks = Leaks::watch();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let control = LoopControl::open().unwrap();
    // Every descriptor of this process is closed, and only the device has one.
    let binding =
        control.ensure_attached(image.as_fd(), &AttachOptions::new(access)).unwrap().binding().clone();
    drop(control);
    assert!(lock_past_the_end(&image).is_some());

    let control = LoopControl::open().unwrap();
    assert_eq!(control.find(image.as_fd()).unwrap()[0].binding(), &binding);
    let user = LoopDevice::open_binding(&binding).unwrap();
    let Detach::Deferred(_) = control.detach_all(image.as_fd()).unwrap() else { panic!("it is held open") };
    assert!(lock_past_the_end(&image).is_some(), "still bound");
    drop(user);
    assert_eq!(lock_past_the_end(&image), None, "the device is gone, and its descriptor with it");
    leaks.check();
}

/// `LOOP_CONFIGURE` flushes the file, so each change to it would have to be waited for.
#[test]
fn attaching_and_detaching_leave_the_file_as_it_is() {
    let leaks = Leaks::watch();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let control = LoopControl::open().unwrap();
    let once = || {
        let device = control.attach(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
        assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    };
    // From the first time on attachments of the file are recorded.
    once();
    let changed = || image.metadata().map(|file| (file.ctime(), file.ctime_nsec())).unwrap();
    let before = changed();
    // A time stamp may be as coarse as a tick.
    std::thread::sleep(std::time::Duration::from_millis(50));
    once();
    assert_eq!(changed(), before);
    leaks.check();
}

#[test]
fn a_file_that_another_program_has_locked_is_not_attached() {
    let leaks = Leaks::watch();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let control = LoopControl::open().unwrap();
    let theirs = File::options().read(true).write(true).open(directory.path().join("image")).unwrap();
    fcntl(&theirs, FcntlArg::F_OFD_SETLK(&whole(libc::F_WRLCK))).unwrap();
    let error = control.attach(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::Busy, Some(Errno::EAGAIN as i32)), "{error}");
    assert!(control.find(image.as_fd()).unwrap().is_empty());
    drop(theirs);
    let device = control.attach(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    assert_eq!(device.detach().unwrap(), Detach::Detached);
    leaks.check();
}

#[test]
fn a_device_without_a_node_is_not_taken_for_absent() {
    let leaks = Leaks::watch();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let control = LoopControl::open().unwrap();
    let options = AttachOptions::new(Access::ReadWrite);
    drop(control.attach(image.as_fd(), &options).unwrap());
    for error in [
        with_covered("/dev", || control.find(image.as_fd())).unwrap_err(),
        with_covered("/dev", || control.ensure_attached(image.as_fd(), &options)).unwrap_err(),
        with_covered("/dev", || control.detach_all(image.as_fd())).unwrap_err(),
    ] {
        assert_eq!(
            (error.kind(), error.errno()),
            (ErrorKind::NotFound, Some(Errno::ENOENT as i32)),
            "{error}"
        );
        assert!(error.to_string().contains("devtmpfs"), "no remedy in: {error}");
    }
    assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Detached);
    leaks.check();
}
