//! Loop devices whose backing file is a block device.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::sys::loop_dev;
use crate::units::DeviceNumber;

const BLOCK: &str = "/sys/block";

/// A loop device that is bound to a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoopOnDevice {
    /// The index of the loop device.
    pub(crate) index: u32,
    /// The device that it is bound to.
    pub(crate) backing: DeviceNumber,
}

/// Returns the loop devices that are bound to block devices.
pub(crate) fn loops_on_devices() -> Vec<LoopOnDevice> {
    let entries = fs::read_dir(BLOCK).into_iter().flatten().flatten();
    let index = |name: &OsStr| name.to_str()?.strip_prefix("loop")?.parse().ok();
    let found = entries.filter_map(|entry| {
        let index = index(&entry.file_name())?;
        let backing = backing(index, &entry.path())?;
        Some(LoopOnDevice { index, backing })
    });
    found.collect()
}

/// Returns the number of the block device to which a loop device is bound. Returns `None` if it is not bound, or bound to a
/// file.
fn backing(index: u32, directory: &Path) -> Option<DeviceNumber> {
    let path = fs::read(directory.join("loop/backing_file")).ok()?;
    // The kernel knows the number. The path of sysfs is one of the mount namespace of another process, so it is used only if
    // there is no node for the loop device.
    match backing_number(index) {
        Some(number) => (number.to_raw() != 0).then_some(number),
        None => number_of_node(Path::new(OsStr::from_bytes(path.trim_ascii_end()))),
    }
}

/// Asks the kernel for the number of the device that a loop device is bound to, which is 0 for a file.
fn backing_number(index: u32) -> Option<DeviceNumber> {
    let info = loop_dev::open_device(index, false).and_then(loop_dev::status).ok()?;
    Some(DeviceNumber::from_raw(info.lo_rdevice))
}

/// Returns the number of a node of a block device.
fn number_of_node(path: &Path) -> Option<DeviceNumber> {
    let node = fs::metadata(path).ok()?;
    node.file_type().is_block_device().then(|| DeviceNumber::from_raw(node.rdev()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_a_missing_path_are_no_block_device() {
        assert_eq!(number_of_node(Path::new("/dev/null")), None);
        assert_eq!(number_of_node(Path::new("/no/such")), None);
    }

    #[test]
    fn a_loop_device_that_is_not_bound_has_no_backing_device() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(backing(0, directory.path()), None);
    }
}
