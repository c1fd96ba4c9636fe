//! Recognises nodes of loop devices by their file status.

use loopfs::DeviceNumber;
use nix::sys::stat::{FileStat, SFlag, major, minor};

/// Returns `true` if a path with this status is the node of a loop device.
pub(crate) fn is_loop_device(status: &FileStat) -> bool {
    const LOOP_MAJOR: u32 = 7;
    kind_of(status) == SFlag::S_IFBLK && number_of(status).major == LOOP_MAJOR
}

/// Returns the device number of the node with this status.
pub(crate) fn number_of(status: &FileStat) -> DeviceNumber {
    DeviceNumber { major: major(status.st_rdev) as u32, minor: minor(status.st_rdev) as u32 }
}

/// Returns the file type of a status.
pub(crate) fn kind_of(status: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(status.st_mode & SFlag::S_IFMT.bits())
}
