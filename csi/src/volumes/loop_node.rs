//! What the status of a path says of loop devices.

use loopfs::DeviceNumber;
use nix::sys::stat::{FileStat, SFlag, major, minor};

use crate::target::kind_of;

/// Whether a path with this status is the node of a loop device.
pub(crate) fn is_loop_device(status: &FileStat) -> bool {
    const LOOP_MAJOR: u32 = 7;
    kind_of(status) == SFlag::S_IFBLK && number_of(status).major == LOOP_MAJOR
}

pub(crate) fn number_of(status: &FileStat) -> DeviceNumber {
    device_number(status.st_rdev)
}

pub(crate) fn device_number(raw: u64) -> DeviceNumber {
    DeviceNumber { major: major(raw) as u32, minor: minor(raw) as u32 }
}
