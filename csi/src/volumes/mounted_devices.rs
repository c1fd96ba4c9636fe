//! The mounts of loop device nodes.

use std::path::{Path, PathBuf};

use loopfs::DeviceNumber;
use loopfs::mount::table as mountinfo;

use crate::error::{Error, Result};
use crate::loop_node;

/// The mounted nodes of loop devices: their mount points and device numbers.
#[derive(Debug, Default)]
pub(crate) struct MountedDevices(Vec<(PathBuf, DeviceNumber)>);

impl MountedDevices {
    /// Finds the mounted devices in a mount table.
    pub(crate) fn among(mounts: &[mountinfo::Mount]) -> Result<Self> {
        let failed = |errno| Error::Target { operation: "stat", path: "/dev".into(), errno };
        let nodes = loop_node::mounted(mounts).map_err(failed)?;
        Ok(Self(nodes.into_iter().map(|(mount, number)| (mount.mount_point.clone(), number)).collect()))
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
