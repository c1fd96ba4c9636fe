//! An empty disk, kept by one process until mkfs.xfs opens it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use loopfs::loop_device::unmanaged::{self, Attributes};
use loopfs::{Bytes, DeviceNumber};
use rustix::fs::{Advice, fadvise};

use super::block_device::{BlockDevice, partitions, users};
use super::check::{Problem, erase_command};
use super::edges::{EDGE, Edges};
use super::lock;
use super::superblock::Superblock;

const OPERATION: &str = "claim the disk";

/// The smallest disk that mkfs.xfs formats.
const MIN_SIZE: Bytes = Bytes(300 << 20);

/// udev holds the lock of a device only while it reads what is on it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// A disk without any content that a program would miss, locked (flock(2)) for its caller.
///
/// Its first and its last 4 MiB have zeros only. The signatures of file systems, partition tables and volume managers lie in
/// these two ranges.
#[derive(Debug)]
pub(crate) struct BlankDisk {
    /// Open exclusively (`O_EXCL`). mkfs.xfs claims the device itself, so drop this just before it starts, and start it without `-f`:
    /// it then refuses a device on which another program has created something in the meantime.
    pub(crate) device: BlockDevice,
    /// While it is held, no other call of [`BlankDisk::claim`] succeeds, and udev does not read the device (see "Locking Block
    /// Device Access" of systemd). When it is dropped, udev notices that, reads the device, and creates its links by label.
    pub(crate) lock: File,
}

impl BlankDisk {
    /// Opens a disk exclusively (`O_EXCL`) and checks that it is empty. Symbolic links are followed. Nothing is written.
    pub(crate) fn claim(path: &Path) -> Result<Self> {
        let locked = open_locked(path)?;
        let device = open_exclusively(&locked.path)?;
        let path = device.path.display();
        let shown = format!("{OPERATION} {path}");
        if device.number != locked.number {
            let (locked, found) = (locked.number, device.number);
            bail!("{shown}: it was device {locked} when it was locked, and is {found} now; try again");
        }
        if device.read_only {
            bail!("{shown}: it is read-only; make it writable with `blockdev --setrw`");
        }
        if device.size < MIN_SIZE {
            bail!("{shown}: it has {}, and XFS needs at least {MIN_SIZE}; give a larger disk", device.size);
        }
        let users = loop_users(&device);
        if !users.is_empty() {
            bail!(
                "{shown}: the disk, or a partition of it, is behind {}; detach that (`losetup --detach`), or give another disk",
                users.join(", ")
            );
        }
        drop_cached_pages(&device.file).context(shown.clone())?;
        let edges = Edges::read(&device.file, device.size.0).context(shown.clone())?;
        let superblock = device.superblock().context(shown.clone())?;
        if let Some(Problem { problem, remedy }) =
            content(&device.path, device.size, &edges, superblock.as_ref())
        {
            bail!("{shown}: {problem}; {remedy}");
        }
        let partitions: Vec<String> = partitions(device.number).into_iter().map(|(_, name)| name).collect();
        if !partitions.is_empty() {
            bail!(
                "{shown}: the kernel still has its partitions {}, although there is no partition table; remove them with \
                 `partx --delete {path}`",
                partitions.join(", ")
            );
        }
        Ok(Self { device, lock: locked.file })
    }
}

/// Opens and locks a device.
fn open_locked(path: &Path) -> Result<BlockDevice> {
    // The descriptor must be writable: udev reads the device again when a writer closes it.
    let device = BlockDevice::open_with(path, OpenOptions::new().read(true).write(true), 0, OPERATION)?;
    let shown = || format!("{OPERATION} {}", device.path.display());
    if !lock::exclusive(&device.file, LOCK_TIMEOUT).with_context(shown)? {
        bail!("{}: another program holds the lock of the device, and may be formatting it", shown());
    }
    Ok(device)
}

fn open_exclusively(path: &Path) -> Result<BlockDevice> {
    let mut options = OpenOptions::new();
    let opened = BlockDevice::open_with(path, options.read(true).write(true), libc::O_EXCL, OPERATION);
    opened.or_else(|error| {
        let cause = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if cause != Some(libc::EBUSY) {
            return Err(error);
        }
        let (users, path) = (users(path), path.display());
        bail!("{OPERATION} {path}: the disk, or a partition of it, is {users}; give another disk")
    })
}

/// Writes the dirty pages of a device, and drops its clean ones, which differ from the disk if another program wrote to the disk by
/// another device. The next read comes from the disk.
fn drop_cached_pages(device: &File) -> io::Result<()> {
    device.sync_all()?;
    Ok(fadvise(device, 0, None, Advice::DontNeed)?)
}

/// Returns the loop devices that are bound to a disk or to a partition of it. The loop driver does not claim the device that
/// it is bound to, so `O_EXCL` does not notice it.
fn loop_users(device: &BlockDevice) -> Vec<String> {
    let mut numbers = vec![device.number];
    numbers.extend(partitions(device.number).into_iter().map(|(number, _)| number));
    let bound = unmanaged::bound_indices().unwrap_or_default();
    bound_to(&numbers, bound.into_iter().map(|index| (index, unmanaged::attributes(index))))
}

/// Returns the paths of the loop devices whose backing device is one of `numbers`.
fn bound_to(numbers: &[DeviceNumber], loops: impl IntoIterator<Item = (u32, Attributes)>) -> Vec<String> {
    let mut users: Vec<String> = loops
        .into_iter()
        .filter(|(_, attributes)| backing_device(attributes).is_some_and(|number| numbers.contains(&number)))
        .map(|(index, _)| format!("/dev/loop{index}"))
        .collect();
    users.sort();
    users
}

/// Returns the number of the block device to which a loop device is bound. Returns `None` if it is bound to a file.
fn backing_device(attributes: &Attributes) -> Option<DeviceNumber> {
    // The kernel knows the number. The path of sysfs is one of the mount namespace of another process, so it is used only if
    // the loop device cannot be opened.
    match attributes.backing {
        Some(_) => attributes.backing_device,
        None => number_of_node(attributes.backing_path.as_deref()?),
    }
}

/// Returns the number of a node of a block device.
fn number_of_node(path: &Path) -> Option<DeviceNumber> {
    let node = fs::metadata(path).ok()?;
    node.file_type().is_block_device().then(|| DeviceNumber::from_raw(node.rdev()))
}

/// Returns that a disk is not empty, and how to go on, or `None` if it is empty.
fn content(device: &Path, size: Bytes, edges: &Edges, superblock: Option<&Superblock>) -> Option<Problem> {
    let first = edges.first_data()?;
    let erase = erase_command(device, if first < EDGE { 0 } else { size.0 - EDGE });
    let device = device.display();
    let (problem, remedy) = if superblock.is_some_and(|superblock| superblock.in_progress) {
        (
            "mkfs.xfs was started on it and has not completed, so it has no file system".to_owned(),
            format!("if mkfs.xfs no longer runs, erase what it wrote with `{erase}`, and try again"),
        )
    } else {
        (
            format!(
                "it is not empty: byte {first} is not zero; `wipefs {device}` lists the formats that it knows; data without a \
                 signature is not listed"
            ),
            format!(
                "if nothing on the disk is needed, erase it with `wipefs --all {device}` and `{erase}`, and try again"
            ),
        )
    };
    Some(Problem { problem, remedy })
}

#[cfg(test)]
mod tests {
    use loopfs::loop_device::BackingFile;

    use super::*;

    /// Loop devices on partitions of the disk count as users too.
    #[test]
    fn loop_devices_on_the_disk_count() {
        let number = |minor| DeviceNumber { major: 254, minor };
        let on = |index, backing_device| {
            let backing = Some(BackingFile { device: number(0), inode: 7 });
            (index, Attributes { backing, backing_device, ..Attributes::default() })
        };
        assert_eq!(
            bound_to(
                &[number(16), number(17)],
                [on(3, Some(number(17))), on(1, Some(number(16))), on(0, Some(number(32))), on(2, None)]
            ),
            ["/dev/loop1", "/dev/loop3"]
        );
    }

    #[test]
    fn other_paths_are_no_block_device() {
        for path in ["/dev/null", "/no/such"] {
            let attributes = Attributes { backing_path: Some(path.into()), ..Attributes::default() };
            assert_eq!(backing_device(&attributes), None);
        }
        assert_eq!(backing_device(&Attributes::default()), None);
    }
}
