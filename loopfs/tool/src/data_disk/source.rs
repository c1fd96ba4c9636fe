//! The name of a data disk: a path, or the UUID of its file system.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Result, bail};
use loopfs::FilesystemUuid;

use super::block_device::{BlockDevice, holders};

const OPERATION: &str = "find the data disk";
const CLASS: &str = "/sys/class/block";

/// A device, by its path or by the XFS on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DiskSource {
    /// A device node, or a symbolic link to one.
    Path(PathBuf),
    /// The UUID of an XFS.
    Uuid(FilesystemUuid),
}

impl DiskSource {
    /// Parses `UUID=...`, as in fstab(5). Anything else is a path.
    pub(crate) fn parse(text: &OsStr) -> Result<Self> {
        if let Some(uuid) = text.as_bytes().strip_prefix(b"UUID=") {
            return Ok(Self::Uuid(String::from_utf8_lossy(uuid).parse()?));
        }
        if ["LABEL=", "PARTLABEL=", "PARTUUID="].iter().any(|tag| text.as_bytes().starts_with(tag.as_bytes()))
        {
            bail!(
                "{OPERATION} {}: of the tags of fstab(5), only UUID= is supported; give UUID=..., which `loopfs data-dir check` \
                 prints, or a path below /dev/disk/by-id",
                text.display()
            );
        }
        Ok(Self::Path(text.into()))
    }

    /// Opens the device.
    ///
    /// A UUID is searched on all devices that sysfs lists, so it needs no udev. The search skips loop devices and devices that
    /// stand on them, such as a volume group within a Block volume, because the owner of the volume chooses what is on them. It
    /// also skips devices that others are built on, such as the disks of a RAID.
    pub(crate) fn open(&self, operation: &'static str) -> Result<BlockDevice> {
        let uuid = match self {
            Self::Path(path) => return BlockDevice::open(path, operation),
            Self::Uuid(uuid) => *uuid,
        };
        let mut found = Vec::new();
        let listed = || format!("{OPERATION} {CLASS}");
        for entry in fs::read_dir(CLASS).with_context(listed)? {
            let path = entry.with_context(listed)?.path();
            found.extend(candidate(&path).filter(|device| has_uuid(device, uuid)));
        }
        only(uuid, found)
    }
}

fn has_uuid(device: &BlockDevice, uuid: FilesystemUuid) -> bool {
    matches!(device.superblock(), Ok(Some(superblock)) if superblock.uuid == uuid)
}

/// Returns the only device that was found.
fn only(uuid: FilesystemUuid, mut found: Vec<BlockDevice>) -> Result<BlockDevice> {
    let paths: Vec<String> = found.iter().map(|device| device.path.display().to_string()).collect();
    match (found.pop(), paths.len()) {
        (Some(device), 1) => Ok(device),
        (None, _) => bail!(
            "{OPERATION} UUID={uuid}: no block device of this machine has such an XFS; see `blkid`, or give the path of the device"
        ),
        _ => {
            bail!("{OPERATION} UUID={uuid}: {} have it; give the path of the right one", paths.join(" and "))
        }
    }
}

/// Opens the device of an entry of sysfs if a data disk may be on it. Devices that cannot be opened, such as drives without
/// a medium, have no data disk.
fn candidate(entry: &Path) -> Option<BlockDevice> {
    if stands_on_loop_device(entry) {
        return None;
    }
    let number = fs::read_to_string(entry.join("dev")).ok()?.trim().parse().ok()?;
    if !holders(number).is_empty() {
        return None;
    }
    BlockDevice::of_number(number, OPERATION).ok()
}

/// Returns `true` if the device of an entry of sysfs is a loop device, or is built on one: by the device mapper, MD RAID or
/// bcache, over any number of layers. Returns `true` too if sysfs does not say what the device is built on.
fn stands_on_loop_device(entry: &Path) -> bool {
    let Ok(device) = fs::canonicalize(entry) else { return true };
    if is_loop_device(&device) {
        return true;
    }
    // The directory of a partition lies in that of its disk, and only the disk has the list of its members.
    let partition = device.join("partition").exists();
    let disk = device.parent().filter(|_| partition).unwrap_or(&device);
    match fs::read_dir(disk.join("slaves")) {
        Ok(members) => members
            .into_iter()
            .any(|member| member.map_or(true, |member| stands_on_loop_device(&member.path()))),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Returns `true` if a path in sysfs is a loop device or a partition of one: `.../block/loop0/loop0p1`.
fn is_loop_device(target: &Path) -> bool {
    let names: Vec<&[u8]> = target.iter().map(OsStr::as_bytes).collect();
    names.windows(2).any(|pair| {
        pair[0] == b"block"
            && pair[1].strip_prefix(b"loop").is_some_and(|number| number.iter().all(u8::is_ascii_digit))
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::symlink;

    use loopfs::{Bytes, DeviceNumber};
    use rstest::rstest;

    use super::*;
    use crate::data_disk::superblock::tests::SECTOR;

    /// An image with the superblock of an XFS, as if it were a device.
    fn image(path: &Path) -> BlockDevice {
        fs::write(path, SECTOR).unwrap();
        BlockDevice {
            path: path.to_owned(),
            number: DeviceNumber { major: 254, minor: 16 },
            size: Bytes(SECTOR.len() as u64),
            read_only: false,
            file: File::open(path).unwrap(),
        }
    }

    #[test]
    fn the_uuid_selects_the_device() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vdb");
        let uuid = "00112233-4455-6677-8899-aabbccddeeff".parse().unwrap();
        assert!(has_uuid(&image(&path), uuid) && !has_uuid(&image(&path), FilesystemUuid([7; 16])));
        assert_eq!(only(uuid, vec![image(&path)]).unwrap().path, path);
        let error = only(uuid, Vec::new()).unwrap_err();
        assert!(error.to_string().contains(&uuid.to_string()), "{error}");
    }

    #[test]
    fn an_ambiguous_uuid_names_both_devices() {
        let directory = tempfile::tempdir().unwrap();
        let devices = ["vdb", "vdc"].map(|name| image(&directory.path().join(name)));
        let error = only(FilesystemUuid([7; 16]), devices.into()).unwrap_err();
        assert!(
            error.to_string().contains("vdb and ") && error.to_string().contains("vdc have it"),
            "{error}"
        );
    }

    /// Creates a directory of sysfs for each device, with links to the devices that it is built on.
    fn sysfs(devices: &[(&str, &[&str])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (device, members) in devices {
            let directory = root.path().join(device);
            let slaves = directory.join("slaves");
            fs::create_dir_all(&slaves).unwrap();
            for member in *members {
                symlink(root.path().join(member), slaves.join(Path::new(member).file_name().unwrap()))
                    .unwrap();
            }
        }
        root
    }

    /// A data disk must not depend on a loop device, which could be that of a volume.
    #[rstest]
    #[case::loop_device("virtual/block/loop0", true)]
    #[case::volume_on_a_loop_device("virtual/block/dm-0", true)]
    #[case::two_layers("virtual/block/md0", true)]
    #[case::partition_of_a_raid("virtual/block/md0/md0p1", true)]
    #[case::disk("pci0/block/vdb", false)]
    #[case::volume_on_a_disk("virtual/block/dm-1", false)]
    #[case::partition_of_a_disk("pci0/block/vdb/vdb1", false)]
    #[case::removed_device("pci0/block/vdc", true)]
    fn devices_above_loop_devices_are_excluded(#[case] device: &str, #[case] expected: bool) {
        let root = sysfs(&[
            ("virtual/block/loop0", &[]),
            ("virtual/block/dm-0", &["virtual/block/loop0"]),
            ("virtual/block/md0", &["pci0/block/vdb", "virtual/block/dm-0"]),
            ("pci0/block/vdb", &[]),
            ("virtual/block/dm-1", &["pci0/block/vdb/vdb1"]),
        ]);
        for partition in ["virtual/block/md0/md0p1", "pci0/block/vdb/vdb1"] {
            fs::create_dir_all(root.path().join(partition)).unwrap();
            fs::write(root.path().join(partition).join("partition"), "1").unwrap();
        }
        assert_eq!(stands_on_loop_device(&root.path().join(device)), expected);
    }

    #[test]
    fn other_texts_are_paths() {
        for path in ["/dev/vdb", "./UUID=x"] {
            assert_eq!(DiskSource::parse(OsStr::new(path)).unwrap(), DiskSource::Path(path.into()));
        }
        DiskSource::parse(OsStr::new("UUID=1234")).unwrap_err();
        let error = DiskSource::parse(OsStr::new("LABEL=loopfs")).unwrap_err().to_string();
        assert!(error.contains("LABEL=loopfs") && error.contains("/dev/disk/by-id"), "{error}");
    }

    #[rstest]
    #[case("../../devices/virtual/block/loop0", true)]
    #[case("../../devices/virtual/block/loop65536/loop65536p1", true)]
    #[case("../../devices/pci0000:00/0000:00:02.0/virtio0/block/vdb", false)]
    #[case("../../devices/virtual/block/dm-0", false)]
    #[case("../../devices/virtual/block/loopy", false)]
    fn sysfs_paths_reveal_loop_devices(#[case] target: &str, #[case] expected: bool) {
        assert_eq!(is_loop_device(Path::new(target)), expected);
    }
}
