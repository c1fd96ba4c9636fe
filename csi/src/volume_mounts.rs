//! The mount points of volumes, and the quotas of the data directory, as the kernel reports them. These functions need no
//! running driver.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use loopfs::loop_device::{BackingFile, LoopDevice, mounted_nodes};
use loopfs::mount::KnownMount;
use loopfs::mount::table::{self, Mount};
use loopfs::project_quota::ProjectQuota;
use loopfs::volume_store::VolumeId;
use loopfs::{DeviceNumber, ErrorKind};
use nix::errno::Errno;
use nix::fcntl::OFlag;

/// Checks that `data_dir` is a mount point whose file system enforces project quotas.
///
/// # Errors
/// The message names what is mounted there instead, if anything. EIO: the disk failed.
pub fn require_project_quotas(data_dir: &Path) -> anyhow::Result<()> {
    // Otherwise the quotas of the file system below it would be checked.
    let mounted = table::at(&table::read()?, data_dir).is_some();
    ensure!(mounted, "nothing is mounted at {}", data_dir.display());
    let directory = File::open(data_dir).with_context(|| format!("open {}", data_dir.display()))?;
    let enforcing = ProjectQuota::of(directory.as_fd()).require_enforcing();
    enforcing.with_context(|| data_dir.display().to_string())
}

/// Returns the mount points outside of `data_dir` of a volume: of its directory, or of the node of a loop device that is
/// bound to its image. Returns `None` if there is no such volume. `data_dir` must be the root of its file system.
///
/// # Errors
/// `/proc`, `/dev` or the data directory cannot be read, or the device of a mounted node cannot be opened, for example because the
/// device cgroup denies it. The node may then be that of this volume.
pub fn mount_points(data_dir: &Path, volume: &VolumeId) -> anyhow::Result<Option<Vec<PathBuf>>> {
    let entry = data_dir.join("volumes").join(volume.as_str());
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
    let file = match OpenOptions::new().read(true).custom_flags(flags.bits()).open(&entry) {
        Ok(file) => BackingFile::of(file)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("open {}", entry.display())),
    };
    let mounts: Vec<_> = table::read()?.into_iter().map(KnownMount::from).collect();
    let directories = mounts.iter().filter(|mount| is_directory_of(mount, volume, file.device));
    let nodes = mounted_nodes(&mounts)?;
    let mut points: Vec<_> = directories.map(|mount| mount.mount_point.clone()).collect();
    for (mount, number) in nodes {
        if is_bound_to(number, &file)? {
            points.push(mount.mount_point.clone());
        }
    }
    Ok(Some(points))
}

/// Returns `true` if a loop device is bound to an image.
fn is_bound_to(number: DeviceNumber, image: &BackingFile) -> loopfs::Result<bool> {
    match LoopDevice::open_device_number(number) {
        Ok(device) => Ok(device.binding().backing == *image),
        // The device is not bound, or was removed (ENODEV).
        Err(error) if error.kind() == ErrorKind::NotFound || error.errno() == Some(Errno::ENODEV as i32) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Returns `true` if the directory of a volume on this file system is mounted.
fn is_directory_of(mount: &Mount, volume: &VolumeId, filesystem: DeviceNumber) -> bool {
    mount.device == filesystem && mount.root == Path::new("/volumes").join(volume.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"\
40 26 254:16 / /data rw - xfs /dev/vdb rw,prjquota\n\
41 40 254:16 /volumes/a /pods/1 rw - xfs /dev/vdb rw,prjquota\n\
42 40 254:16 /volumes/ab /pods/2 rw - xfs /dev/vdb rw,prjquota\n\
43 40 254:32 /volumes/a /pods/3 rw - xfs /dev/vdc rw\n";

    #[test]
    fn only_mounts_from_this_filesystem_count() {
        let mounts = table::parse(TABLE).unwrap();
        let (volume, filesystem) = ("a".parse().unwrap(), "254:16".parse().unwrap());
        let published = mounts.iter().filter(|mount| is_directory_of(mount, &volume, filesystem));
        let points: Vec<_> = published.map(|mount| mount.mount_point.to_str().unwrap()).collect();
        assert_eq!(points, ["/pods/1"]);
    }
}
