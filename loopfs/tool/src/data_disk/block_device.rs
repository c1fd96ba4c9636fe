//! A block device as the kernel knows it: its size, and who else uses it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use loopfs::mount::table as mountinfo;
use loopfs::{Bytes, DeviceNumber};

use super::superblock::Superblock;

/// A block device that is open.
#[derive(Debug)]
pub(crate) struct BlockDevice {
    /// The path without symbolic links.
    pub(crate) path: PathBuf,
    pub(crate) number: DeviceNumber,
    pub(crate) size: Bytes,
    pub(crate) read_only: bool,
    pub(crate) file: File,
}

impl BlockDevice {
    /// Opens a device for reading. Follows symbolic links, such as those of udev, and keeps the path of the device itself.
    pub(crate) fn open(path: &Path, operation: &'static str) -> Result<Self> {
        Self::open_with(path, OpenOptions::new().read(true), 0, operation)
    }

    /// Opens a device with further options and flags of open(2).
    pub(crate) fn open_with(
        path: &Path,
        options: &mut OpenOptions,
        flags: i32,
        operation: &'static str,
    ) -> Result<Self> {
        let path = fs::canonicalize(path).with_context(|| format!("{operation} {}", path.display()))?;
        let shown = || format!("{operation} {}", path.display());
        // The type is checked before the device is opened: opening a tape or a FIFO has effects.
        let expected = fs::metadata(&path).with_context(shown)?;
        if !expected.file_type().is_block_device() {
            bail!("{}: it is no block device; give a disk, a partition or a logical volume", shown());
        }
        let mut file = options
            .custom_flags(flags | libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(&path)
            .with_context(shown)?;
        if file.metadata().with_context(shown)?.rdev() != expected.rdev() {
            bail!("{}: another device has this path now; try again", shown());
        }
        let number = DeviceNumber::from_raw(expected.rdev());
        let size = file.seek(SeekFrom::End(0)).with_context(shown)?;
        let read_only = attribute(number, "ro").with_context(shown)?.trim() == "1";
        Ok(Self { number, size: Bytes(size), read_only, file, path })
    }

    /// Opens the device with a number for reading.
    pub(crate) fn of_number(number: DeviceNumber, operation: &'static str) -> Result<Self> {
        let name = attribute(number, "uevent").ok().and_then(|uevent| {
            uevent.lines().find_map(|line| line.strip_prefix("DEVNAME=").map(str::to_owned))
        });
        let Some(name) = name else {
            bail!(
                "{operation} device {number}: sysfs has no block device of this number; mount sysfs at /sys"
            );
        };
        let device = Self::open(&Path::new("/dev").join(name), operation)?;
        if device.number != number {
            let (path, found) = (device.path.display(), device.number);
            bail!("{operation} {path}: it is device {found}, and not {number} as in sysfs");
        }
        Ok(device)
    }

    /// Reads the superblock of XFS, or returns `None` if there is none.
    pub(crate) fn superblock(&self) -> io::Result<Option<Superblock>> {
        Superblock::read(&self.file, self.size.0)
    }
}

/// Returns who uses the device at a path, as far as the kernel names them.
pub(crate) fn users(path: &Path) -> String {
    const UNNAMED: &str = "in use by another program, or as swap (`swapon --show`)";
    let Ok(device) = BlockDevice::open(path, "look up the users of") else { return UNNAMED.to_owned() };
    let mut users = Vec::new();
    let mut devices = vec![device.number];
    devices.extend(partitions(device.number).into_iter().map(|(number, _)| number));
    for mount in mountinfo::read().unwrap_or_default() {
        if devices.contains(&mount.device) && mount.root == Path::new("/") {
            users.push(format!("mounted at {}", mount.mount_point.display()));
        }
    }
    for number in &devices {
        users.extend(holders(*number).into_iter().map(|holder| format!("part of {holder}")));
    }
    if users.is_empty() { UNNAMED.to_owned() } else { users.join(", ") }
}

fn directory(number: DeviceNumber) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{number}"))
}

fn attribute(number: DeviceNumber, name: &str) -> io::Result<String> {
    fs::read_to_string(directory(number).join(name))
}

/// Returns the size of a device that need not have a node in `/dev`.
pub(crate) fn size_of(number: DeviceNumber) -> Result<Bytes> {
    let shown = || format!("read the size of device {number}");
    let sectors = attribute(number, "size").with_context(shown)?;
    let sectors = sectors.trim().parse::<u64>().with_context(shown)?;
    Ok(Bytes(sectors.saturating_mul(512)))
}

/// Returns the partitions of a disk that the kernel knows.
pub(crate) fn partitions(number: DeviceNumber) -> Vec<(DeviceNumber, String)> {
    let entries = fs::read_dir(directory(number)).into_iter().flatten().flatten();
    let partition = |entry: fs::DirEntry| {
        let path = entry.path();
        path.join("partition").exists().then_some(())?;
        let number = fs::read_to_string(path.join("dev")).ok()?.trim().parse().ok()?;
        Some((number, entry.file_name().to_string_lossy().into_owned()))
    };
    entries.filter_map(partition).collect()
}

/// Returns the names of the devices that are built on this one: those of the device mapper, MD RAID and bcache.
pub(crate) fn holders(number: DeviceNumber) -> Vec<String> {
    let entries = fs::read_dir(directory(number).join("holders")).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_not_opened() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        // To open a FIFO for reading would wait for a writer.
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [Path::new("/dev/null"), directory.path(), &fifo] {
            let error = BlockDevice::open(path, "check").unwrap_err();
            assert!(error.to_string().contains("no block device"), "{error}");
        }
        let error = BlockDevice::open(&directory.path().join("absent"), "check").unwrap_err();
        let error = error.downcast_ref::<io::Error>().expect("the error of the kernel");
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
    }

    #[test]
    fn a_number_without_device_is_named() {
        let number = DeviceNumber { major: 4095, minor: 77 };
        let error = BlockDevice::of_number(number, "check").unwrap_err();
        assert!(error.to_string().contains("4095:77"), "{error}");
        assert!(size_of(number).is_err() && partitions(number).is_empty() && holders(number).is_empty());
    }
}
