//! The mounts of loop device nodes.

use std::path::{Path, PathBuf};

use loopfs::DeviceNumber;
use loopfs::mount::table as mountinfo;
use nix::sys::stat::stat;

use super::loop_node::{device_number, is_loop_device, number_of};
use crate::error::{Error, Result};

/// The mounted nodes of loop devices: their mount points and device numbers.
///
/// The name of a mounted file proves nothing. A pod can have the kubelet mount, as a subPath of its own volume, a file
/// of any name or a device node that the pod created itself. The device number is therefore compared, and so is the
/// file system of the node. Only mounts of that file system are examined, because a stat(2) on another one could hang
/// if its server does not respond.
#[derive(Debug, Default)]
pub(crate) struct MountedDevices(Vec<(PathBuf, DeviceNumber)>);

impl MountedDevices {
    /// Finds the mounted devices in a mount table.
    pub(crate) fn among(mounts: &[mountinfo::Mount]) -> Result<Self> {
        const NODES: &str = "/dev";
        let failed = |errno| Error::Target { operation: "stat", path: NODES.into(), errno };
        let nodes = device_number(stat(NODES).map_err(failed)?.st_dev);
        let of_nodes = mounts.iter().filter(|mount| mount.device == nodes);
        let devices = of_nodes.filter_map(|mount| {
            // If stat(2) fails, the mount point was unmounted after the table was read.
            let status = stat(&mount.mount_point).ok().filter(is_loop_device)?;
            Some((mount.mount_point.clone(), number_of(&status)))
        });
        Ok(Self(devices.collect()))
    }

    /// Returns a mount point of this device, other than `except`.
    pub(crate) fn find(&self, device: DeviceNumber, except: Option<&Path>) -> Option<&Path> {
        let Self(mounted) = self;
        let showing = mounted.iter().filter(|(_, number)| *number == device);
        showing.map(|(mount_point, _)| mount_point.as_path()).find(|mount_point| Some(*mount_point) != except)
    }

    pub(crate) fn numbers(&self) -> impl Iterator<Item = DeviceNumber> {
        self.0.iter().map(|(_, number)| *number)
    }
}
