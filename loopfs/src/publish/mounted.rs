//! Nodes of loop devices, and their mounts.

use std::path::Path;

use nix::sys::stat::{FileStat, SFlag};

use crate::DeviceNumber;
use crate::error::Result;
use crate::loop_device::{MAJOR, mounted_nodes};
use crate::mount::KnownMount;

/// Returns `true` if a path with this status is the node of a loop device.
pub(super) fn is_loop_device(status: &FileStat) -> bool {
    kind_of(status) == SFlag::S_IFBLK && number_of(status).major == MAJOR
}

/// Returns the device number of the node with this status.
pub(super) fn number_of(status: &FileStat) -> DeviceNumber {
    DeviceNumber::from_raw(status.st_rdev)
}

/// Returns the file type of a status.
pub(super) fn kind_of(status: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(status.st_mode & SFlag::S_IFMT.bits())
}

/// The mounted nodes of loop devices: their mounts and device numbers.
#[derive(Debug, Default)]
pub(crate) struct MountedDevices(Vec<(KnownMount, DeviceNumber)>);

impl MountedDevices {
    /// Finds the mounted devices among mounts.
    pub(crate) fn among(mounts: &[KnownMount]) -> Result<Self> {
        mounted_nodes(mounts).map(Self)
    }

    /// Returns a mount point of this device, other than `except`.
    pub(crate) fn find(&self, device: DeviceNumber, except: Option<&Path>) -> Option<&Path> {
        let Self(mounted) = self;
        let showing = mounted.iter().filter(|(_, number)| *number == device);
        showing.map(|(mount, _)| mount.mount_point.as_path()).find(|mount_point| Some(*mount_point) != except)
    }

    /// Returns the mount points, each with the number of its device.
    pub(crate) fn mount_points(&self) -> impl Iterator<Item = (&Path, DeviceNumber)> {
        self.0.iter().map(|(mount, number)| (mount.mount_point.as_path(), *number))
    }
}
