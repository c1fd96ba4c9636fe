//! Tests on a kernel that has not loaded the loop module yet.

use std::path::Path;
use std::time::{Duration, Instant};

use loopfs::loop_device::{Access, AttachOptions, LoopControl};
use nix::errno::Errno;
use nix::kmod::{DeleteModuleFlags, delete_module};

use crate::environment::{Leaks, directory, image};

/// The timeout for unloading the module. It is longer than a background thread of an earlier test keeps a
/// device open.
const UNLOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Unloads the loop module, which removes all loop devices.
pub(crate) fn unload_loop_module() {
    LoopControl::open().unwrap().remove_idle(0);
    let start = Instant::now();
    loop {
        match delete_module(c"loop", DeleteModuleFlags::O_NONBLOCK) {
            Ok(()) => break,
            Err(Errno::EAGAIN | Errno::EBUSY) if start.elapsed() < UNLOAD_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(errno) => panic!("unload the loop module: {errno}"),
        }
    }
    for path in ["/sys/module/loop", "/sys/devices/virtual/block/loop0", "/dev/loop-control"] {
        assert!(!Path::new(path).exists(), "{path} is still there");
    }
}

#[test]
fn opening_loop_control_loads_the_module() {
    let _leaks = Leaks::watch();
    unload_loop_module();
    let loops = LoopControl::open().unwrap();
    loops.verify().unwrap();
    let directory = directory();
    let image = image(directory.path(), "image", 1 << 20);
    let device = loops.attach(&image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    loops.detach(device).unwrap();
    let left: Vec<_> = std::fs::read_dir("/dev")
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name.to_string_lossy().starts_with(".loopfs-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}
