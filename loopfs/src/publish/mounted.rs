//! The mounts of loop device nodes.

use std::path::Path;

use crate::DeviceNumber;
use crate::error::Result;
use crate::loop_device::mounted_nodes;
use crate::mount::KnownMount;

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
