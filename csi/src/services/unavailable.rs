//! Reports about published volumes while the storage is unavailable. Nothing here reads the data disk, which may hang:
//! the mount table, sysfs and the counters that the file system keeps in memory are sufficient.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

use loopfs::loop_device::mounted_nodes;
use loopfs::mount::{KnownMount, table as mountinfo};
use loopfs::publish::{PublishedDevices, Target};
use loopfs::volume_store::{AbnormalReason, Condition, InodeStats, VolumeId, VolumeStats};
use loopfs::{Bytes, DeviceNumber, Inodes};
use nix::errno::Errno;
use nix::sys::statvfs::statvfs;

use crate::error::{Error, Result};

/// Returns the published volumes.
pub(super) fn published(
    mounts: &[KnownMount],
    held: Option<&PublishedDevices>,
) -> Result<BTreeSet<VolumeId>> {
    let directories = mounts.iter().filter_map(|mount| volume_of_mount(mount));
    let devices = mounted_nodes(mounts)?;
    let images = devices.iter().filter_map(|(_, number)| volume_of_device(*number, held));
    Ok(directories.chain(images).collect())
}

/// Returns the use and capacity of the volume at `target`. Returns `None` if the volume is not published there.
pub(super) fn stats(
    volume: &VolumeId,
    target: &Target,
    held: Option<&PublishedDevices>,
    reason: String,
) -> Result<Option<VolumeStats>> {
    let Some(mount) = target.mount()? else { return Ok(None) };
    if volume_of_mount(&mount).as_ref() == Some(volume) {
        return directory_stats(target.path(), reason).map(Some);
    }
    // The device node is not on the data disk, so this does not block.
    let Some(device) = target.loop_device()? else { return Ok(None) };
    if volume_of_device(device, held).as_ref() != Some(volume) {
        return Ok(None);
    }
    let size = size_of_device(device).unwrap_or_default();
    let condition = condition(reason);
    Ok(Some(VolumeStats::new(size, size, condition)))
}

/// Returns an error if a loop device may be attached to the image of the volume. Without the disk, the driver cannot compare the
/// two, and detaches no device.
pub(super) fn require_detached(
    volume: &VolumeId,
    held: Option<&PublishedDevices>,
    reason: &str,
) -> Result<()> {
    const DEVICES: &str = "/sys/dev/block";
    let failed = |error: std::io::Error| {
        let errno = Errno::from_raw(error.raw_os_error().unwrap_or_default());
        Error::File { operation: "list", path: DEVICES.into(), errno }
    };
    for entry in std::fs::read_dir(DEVICES).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let number = name.to_str().and_then(|name| name.parse::<DeviceNumber>().ok());
        if let Some(number) = number
            && volume_of_device(number, held).as_ref() == Some(volume)
        {
            return Err(Error::StorageUnavailable(format!(
                "{reason}; the block device {number} of volume {volume} can be detached only with the disk"
            )));
        }
    }
    Ok(())
}

/// Reads the limits of a directory with a project quota, and the free part of them, with statfs(2).
fn directory_stats(path: &Path, reason: String) -> Result<VolumeStats> {
    let failed = |errno: Errno| Error::File { operation: "statfs", path: path.to_owned(), errno };
    let counters = statvfs(path).map_err(failed)?;
    let used = |total: u64, free: u64| total.saturating_sub(free);
    let bytes = |blocks: u64| Bytes(blocks * counters.fragment_size());
    let used_blocks = used(counters.blocks(), counters.blocks_free());
    let mut stats = VolumeStats::new(bytes(counters.blocks()), bytes(used_blocks), condition(reason));
    let used_inodes = used(counters.files(), counters.files_free());
    stats.inodes = Some(InodeStats::new(Inodes(counters.files()), Inodes(used_inodes)));
    Ok(stats)
}

/// Returns the condition of all published volumes.
pub(super) fn condition(reason: String) -> Condition {
    Condition::abnormal(AbnormalReason::StorageFailed, reason)
}

/// Returns the Filesystem volume that is mounted, according to the path of its directory on the data disk.
fn volume_of_mount(mount: &mountinfo::Mount) -> Option<VolumeId> {
    let name = mount.root.strip_prefix("/volumes").ok().filter(|_| mount.fs_type == "xfs")?;
    parse(name.iter().next()?)
}

/// Returns the Block volume for which this driver holds a device. For other devices, which no pod has or which an earlier driver has
/// published, returns the volume that the path of the file names. A pod can bind its device to a file with such a path, but that
/// is believed only until the disk is there. Any query beyond the path would make the kernel access the data disk.
fn volume_of_device(device: DeviceNumber, held: Option<&PublishedDevices>) -> Option<VolumeId> {
    if let Some(volume) = held.and_then(|held| held.volume_of(device)) {
        return volume;
    }
    let path = std::fs::read_to_string(format!("/sys/dev/block/{device}/loop/backing_file")).ok()?;
    let path = path.trim_end_matches('\n');
    // The kernel's mark of a removed file.
    let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(path));
    let in_store = path.parent().is_some_and(|parent| parent.ends_with("volumes"));
    path.file_name().filter(|_| in_store).and_then(parse)
}

fn size_of_device(device: DeviceNumber) -> Option<Bytes> {
    const SECTOR: u64 = 512;
    let sectors = std::fs::read_to_string(format!("/sys/dev/block/{device}/size")).ok()?;
    Some(Bytes(sectors.trim_end().parse::<u64>().ok()? * SECTOR))
}

fn parse(name: &OsStr) -> Option<VolumeId> {
    name.to_str().and_then(|name| VolumeId::parse(name).ok())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// It is the first component below `volumes`.
    #[rstest]
    #[case::volume("/volumes/pvc-1", "xfs", Some("pvc-1"))]
    #[case::sub_path("/volumes/pvc-1/sub", "xfs", Some("pvc-1"))]
    #[case::data_disk("/", "xfs", None)]
    #[case::all_volumes("/volumes", "xfs", None)]
    #[case::other_file_system("/volumes/pvc-1", "ext4", None)]
    fn mount_root_names_the_volume(#[case] root: &str, #[case] fs_type: &str, #[case] volume: Option<&str>) {
        let table = format!("50 40 254:16 {root} /target rw - {fs_type} /dev/vdb rw\n");
        let found = volume_of_mount(&mountinfo::parse(table.as_bytes()).unwrap()[0]);
        assert_eq!(found.as_ref().map(VolumeId::as_str), volume);
    }
}
