//! The loop module with partitions, which leave fewer indices. The module is loaded again for it, as no test has a device then.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;

use loopfs::ErrorKind;
use loopfs::loop_device::{Access, AttachOptions, Detach, IndexPolicy, LoopControl, PoolOptions};
use nix::errno::Errno;
use nix::kmod::{DeleteModuleFlags, ModuleInitFlags, delete_module, finit_module};

use crate::environment::{Leaks, directory, image};

/// Where the test machine has it.
const MODULE: &str = "/modules/loop.ko";

/// The module with other parameters, until it is dropped.
struct Reloaded;

impl Reloaded {
    fn with(parameters: &CStr) -> Self {
        reload(parameters);
        Self
    }
}

impl Drop for Reloaded {
    fn drop(&mut self) {
        // A test that has failed may have left a device attached, and its own message is the one that counts.
        if !std::thread::panicking() {
            reload(c"");
        }
    }
}

fn reload(parameters: &CStr) {
    // Many at once, where the module would remove one after the other.
    LoopControl::open().unwrap().remove_idle(0);
    delete_module(c"loop", DeleteModuleFlags::O_NONBLOCK).expect("unload the loop module");
    finit_module(File::open(MODULE).unwrap(), parameters, ModuleInitFlags::empty()).expect("load it again");
}

#[test]
fn the_default_range_fits_fifteen_partitions_and_devices_work_there() {
    let leaks = Leaks::watch();
    {
        let _module = Reloaded::with(c"max_part=15");
        assert_eq!(PoolOptions::default().range, 0x8000..0x1_0000);
        let directory = directory();
        let image = image(directory.path(), "image", 1 << 20);
        let control = LoopControl::open().unwrap();
        let beyond = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Exact(0x1_0000));
        let error = control.attach(image.as_fd(), &beyond).unwrap_err();
        assert_eq!(
            (error.kind(), error.errno()),
            (ErrorKind::InvalidInput, Some(Errno::EINVAL as i32)),
            "{error}"
        );
        let last = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Exact(0xffff));
        drop(control.attach(image.as_fd(), &last).unwrap());
        assert_eq!(control.detach_all(image.as_fd()).unwrap(), Detach::Detached);
        drop((control, image));

        // The kernel looks for partitions when it attaches a device, and so has the beginning of a read-only device in its page
        // cache: what is written there through the writable one afterwards is not seen.
        let cached = "a_read_only_device_refuses_writes_beside_a_writable_one";
        let tests = ["loop_devices::", "--test-threads=1", "--skip", "thirty_two_threads", "--skip", cached];
        let output = Command::new(std::env::current_exe().unwrap()).args(tests).output().unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !text.contains(" 0 passed"), "{text}");
    }
    leaks.check();
}

#[test]
fn the_default_range_fits_the_most_partitions() {
    let leaks = Leaks::watch();
    {
        let _module = Reloaded::with(c"max_part=255");
        let directory = directory();
        let image = image(directory.path(), "image", 1 << 20);
        let control = LoopControl::open().unwrap();
        let device = control.attach(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
        assert_eq!(device.index(), 0x800);
        assert_eq!(device.detach().unwrap(), Detach::Detached);
    }
    leaks.check();
}
