//! Recognises nodes of loop devices by their file status.

use loopfs::DeviceNumber;
use nix::sys::stat::{FileStat, SFlag, major, minor};

use crate::target::kind_of;

/// Returns `true` if a path with this status is the node of a loop device.
pub(crate) fn is_loop_device(status: &FileStat) -> bool {
    const LOOP_MAJOR: u32 = 7;
    kind_of(status) == SFlag::S_IFBLK && number_of(status).major == LOOP_MAJOR
}

/// Returns the device number of the node with this status.
pub(crate) fn number_of(status: &FileStat) -> DeviceNumber {
    device_number(status.st_rdev)
}

pub(crate) fn device_number(raw: u64) -> DeviceNumber {
    DeviceNumber { major: major(raw) as u32, minor: minor(raw) as u32 }
}
