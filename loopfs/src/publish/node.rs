//! Recognises nodes of loop devices by their file status.

use nix::sys::stat::{FileStat, SFlag};

use crate::{DeviceNumber, loop_device};

/// Returns `true` if a path with this status is the node of a loop device.
pub(crate) fn is_loop_device(status: &FileStat) -> bool {
    kind_of(status) == SFlag::S_IFBLK && number_of(status).major == loop_device::MAJOR
}

/// Returns the device number of the node with this status.
pub(crate) fn number_of(status: &FileStat) -> DeviceNumber {
    DeviceNumber::from_raw(status.st_rdev)
}

/// Returns the file type of a status.
pub(crate) fn kind_of(status: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(status.st_mode & SFlag::S_IFMT.bits())
}
