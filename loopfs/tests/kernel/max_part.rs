//! Tests of the loop module with partitions, which leave fewer indices. Each test reloads the module, since no other
//! test has a device at that time.

use std::ffi::CStr;
use std::fs::File;
use std::process::Command;

use loopfs::ErrorKind;
use loopfs::loop_device::{Access, AttachOptions, Detach, IndexPolicy, LoopControl, PoolOptions};
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};

use crate::environment::{Leaks, MIB, directory, image};
use crate::fixtures::assert_refused;
use crate::module::unload_loop_module;

/// The path of the module on the test machine.
const MODULE: &str = "/modules/loop.ko";

/// The loop module loaded with other parameters. Dropping it reloads the module with its defaults.
struct Reloaded;

impl Reloaded {
    fn with(parameters: &CStr) -> Self {
        reload(parameters);
        Self
    }
}

impl Drop for Reloaded {
    fn drop(&mut self) {
        // A failed test may have left a device attached. Its own message must not be hidden by a panic here.
        if !std::thread::panicking() {
            reload(c"");
        }
    }
}

fn reload(parameters: &CStr) {
    unload_loop_module();
    finit_module(File::open(MODULE).unwrap(), parameters, ModuleInitFlags::empty()).expect("load it again");
}

/// The tests of `loop_devices` pass with devices of that range.
#[test]
fn the_default_range_fits_fifteen_partitions() {
    let _leaks = Leaks::watch();
    let _module = Reloaded::with(c"max_part=15");
    assert_eq!(PoolOptions::default().range, 0x8000..0x1_0000);
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let control = LoopControl::open().unwrap();
    let beyond = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Exact(0x1_0000));
    assert_refused(control.attach(&image, &beyond), ErrorKind::InvalidInput, Some(Errno::EINVAL));
    let last = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Exact(0xffff));
    drop(control.attach(&image, &last).unwrap());
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
    drop((control, image));

    // When the kernel attaches a device, it looks for partitions and so reads the beginning of a read-only device
    // into that device's page cache. The test that this one skips would not see data that is written there later
    // through the writable device.
    let cached = "a_read_only_device_refuses_writes";
    let tests = ["loop_devices::", "--test-threads=1", "--skip", "thirty_two_threads", "--skip", cached];
    let output = Command::new(std::env::current_exe().unwrap()).args(tests).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains(" 0 passed"), "{text}");
}

#[test]
fn the_default_range_fits_maximum_partitions() {
    let _leaks = Leaks::watch();
    let _module = Reloaded::with(c"max_part=255");
    let directory = directory();
    let image = image(directory.path(), "image", MIB);
    let control = LoopControl::open().unwrap();
    let device = control.attach(&image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    assert_eq!(device.index(), 0x800);
    assert_eq!(device.detach().unwrap(), Detach::Detached);
}
