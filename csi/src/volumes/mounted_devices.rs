//! Which loop devices are mounted, and where.

use std::path::{Path, PathBuf};

use loopfs::{DeviceNumber, mountinfo};
use nix::sys::stat::stat;

use super::loop_node::{device_number, is_loop_device, number_of};
use crate::error::{Error, Result};

/// The mounts that show the node of a loop device in `/dev`: their mount points, and the numbers of the devices.
///
/// The name of what is mounted proves nothing: a pod can have the kubelet mount a file of any name, or a device node that
/// it made itself, as a subPath of its own volume. So the device number is compared, and the file system on which the
/// node lies. Only mounts of that file system are looked at: a stat(2) of another could hang on a server that is gone.
#[derive(Debug, Default)]
pub(crate) struct MountedDevices(Vec<(PathBuf, DeviceNumber)>);

impl MountedDevices {
    /// Finds them in a mount table.
    pub(crate) fn among(mounts: &[mountinfo::Mount]) -> Result<Self> {
        const NODES: &str = "/dev";
        let failed = |errno| Error::Target { operation: "stat", path: NODES.into(), errno };
        let nodes = device_number(stat(NODES).map_err(failed)?.st_dev);
        let of_nodes = mounts.iter().filter(|mount| mount.device == nodes);
        let devices = of_nodes.filter_map(|mount| {
            // A mount point without a status was unmounted after the table was read.
            let status = stat(&mount.mount_point).ok().filter(is_loop_device)?;
            Some((mount.mount_point.clone(), number_of(&status)))
        });
        Ok(Self(devices.collect()))
    }

    /// Returns a mount point, other than `except`, that shows this device.
    pub(crate) fn find(&self, device: DeviceNumber, except: Option<&Path>) -> Option<&Path> {
        let Self(mounted) = self;
        let showing = mounted.iter().filter(|(_, number)| *number == device);
        showing.map(|(mount_point, _)| mount_point.as_path()).find(|mount_point| Some(*mount_point) != except)
    }

    pub(crate) fn numbers(&self) -> impl Iterator<Item = DeviceNumber> {
        self.0.iter().map(|(_, number)| *number)
    }
}
