//! Tests of the index lock: the descriptor that a loop device holds keeps the lock that identifies the device
//! of a file.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use loopfs::ErrorKind;
use loopfs::loop_device::{Access, AttachOptions, Detach, LoopControl, LoopDevice};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use rstest::rstest;

use crate::environment::{Leaks, MIB, directory, image};
use crate::fixtures::{TestImage, assert_fails, assert_refused};
use crate::refusals::with_covered;

/// Returns the start of the first lock that conflicts with a lock on all of the file past 4 EiB, or `None` if
/// none conflicts.
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
fn the_index_lock_lasts_while_attached(#[values(Access::ReadWrite, Access::ReadOnly)] access: Access) {
    let _leaks = Leaks::watch();
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let control = LoopControl::open().unwrap();
    // From here on this process has closed all its descriptors, and only the device holds one.
    let binding = control.ensure_attached(&image, &AttachOptions::new(access)).unwrap().binding().clone();
    drop(control);
    assert!(lock_past_the_end(&image).is_some());

    let control = LoopControl::open().unwrap();
    assert_eq!(control.find(&image).unwrap()[0].binding(), &binding);
    let user = LoopDevice::open_binding(&binding).unwrap();
    let Detach::Deferred(_) = control.detach_all(&image).unwrap() else { panic!("the device is open") };
    assert!(lock_past_the_end(&image).is_some(), "the device is still attached");
    drop(user);
    assert_eq!(lock_past_the_end(&image), None, "the device was detached, so its descriptor is closed");
}

/// `LOOP_CONFIGURE` flushes the file, so attaching would have to wait for any change of the file.
#[test]
fn attaching_does_not_change_the_file() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let once = || {
        let device = control.attach(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
        assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    };
    // After the first attachment the file is tracked.
    once();
    let changed = || image.metadata().map(|file| (file.ctime(), file.ctime_nsec())).unwrap();
    let before = changed();
    // The resolution of a time stamp can be as coarse as a timer tick.
    std::thread::sleep(std::time::Duration::from_millis(50));
    once();
    assert_eq!(changed(), before);
}

#[test]
fn attaching_a_locked_file_fails() {
    let TestImage { control, directory, image, .. } = &TestImage::new(MIB);
    let theirs = File::options().read(true).write(true).open(directory.path().join("image")).unwrap();
    fcntl(&theirs, FcntlArg::F_OFD_SETLK(&whole(libc::F_WRLCK))).unwrap();
    assert_refused(
        control.attach(image, &AttachOptions::new(Access::ReadWrite)),
        ErrorKind::Busy,
        Some(Errno::EAGAIN),
    );
    assert!(control.find(image).unwrap().is_empty());
    drop(theirs);
    let device = control.attach(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    assert_eq!(device.detach().unwrap(), Detach::Detached);
}

/// If the nodes are missing, the calls fail and do not report the file as unattached.
#[test]
fn an_attached_device_needs_its_node() {
    let TestImage { control, directory, image, .. } = &TestImage::new(MIB);
    let other = crate::environment::image(directory.path(), "other", MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    drop(control.attach(image, &options).unwrap());
    for result in [
        with_covered("/dev", || control.find(image).map(drop)),
        with_covered("/dev", || control.ensure_attached(image, &options).map(drop)),
        with_covered("/dev", || control.detach_all(image).map(drop)),
    ] {
        let error = assert_refused(result, ErrorKind::NotFound, Some(Errno::ENOENT));
        assert!(error.to_string().contains("devtmpfs"), "no remedy in: {error}");
    }
    // The device that another file would get is not reported as absent either.
    let error = assert_fails(with_covered("/dev", || control.attach(&other, &options)), ErrorKind::NotFound);
    assert!(error.to_string().contains("devtmpfs"), "no remedy in: {error}");
    assert!(control.find(&other).unwrap().is_empty());
}
