//! An empty disk, kept by one process until mkfs.xfs opens it.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::Flock;

use super::block_device::{BlockDevice, partitions};
use super::check::erase_command;
use super::loop_backing::{LoopOnDevice, loops_on_devices};
use super::signature::{EDGE, Edges, Signature};
use super::superblock::Superblock;
use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::flock;
use crate::sys::block::flush_buffers;
use crate::units::{Bytes, DeviceNumber};

const OPERATION: &str = "claim the disk";

/// The smallest disk that mkfs.xfs formats.
pub const MIN_SIZE: Bytes = Bytes(300 << 20);

/// udev holds the lock of a device only while it reads what is on it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// A disk without any content that a program would miss, which no other program can mount or claim.
///
/// Its first and its last 4 MiB have zeros only. The signatures of file systems, partition tables and volume managers lie in
/// these two ranges.
#[derive(Debug)]
pub struct BlankDisk {
    device: BlockDevice,
    lock: FormatLock,
}

/// The lock on a disk that is being formatted (flock(2)).
///
/// While it is held, no other call of [`BlankDisk::claim`] succeeds, and udev does not read the device (see "Locking Block
/// Device Access" of systemd). When it is dropped, udev notices that, reads the device, and creates its links by label.
#[derive(Debug)]
pub struct FormatLock {
    number: DeviceNumber,
    _lock: Flock<OwnedFd>,
}

impl BlankDisk {
    /// Opens a disk exclusively (`O_EXCL`) and checks that it is empty. Symbolic links are followed. Nothing is written.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: there is something on the disk; the error names each signature with its offset, or the
    /// first byte that is not zero, and the command that erases it. [`ErrorKind::Busy`]: the disk or one of its partitions
    /// is mounted, in use as swap, part of another device or behind a loop device, or another program formats it. [`ErrorKind::InvalidInput`]: no
    /// block device, or smaller than [`MIN_SIZE`]. [`ErrorKind::ReadOnly`]: the disk is read-only.
    pub fn claim(path: &Path) -> Result<Self> {
        let (path, lock) = FormatLock::acquire(path)?;
        let device = open_exclusively(&path)?;
        let shown = device.path.display().to_string();
        let refused = |kind, cause: String| Error::new(kind, OPERATION, &shown, cause);
        if device.number != lock.number {
            let cause =
                format!("it was device {} when it was locked, and is {} now", lock.number, device.number);
            return Err(refused(ErrorKind::Busy, cause).with_remedy("try again"));
        }
        if device.read_only {
            return Err(refused(ErrorKind::ReadOnly, "it is read-only".to_owned())
                .with_remedy("make it writable with `blockdev --setrw`"));
        }
        if device.size < MIN_SIZE {
            let cause = format!("it has {}, and XFS needs at least {MIN_SIZE}", device.size);
            return Err(refused(ErrorKind::InvalidInput, cause).with_remedy("give a larger disk"));
        }
        let users = loop_users(&device);
        if !users.is_empty() {
            let cause = format!("the disk, or a partition of it, is behind {}", users.join(", "));
            return Err(refused(ErrorKind::Busy, cause)
                .with_remedy("detach that (`losetup --detach`), or give another disk"));
        }
        // A program that kept the device open can have left pages that differ from the disk.
        flush_buffers(&device.file).context(OPERATION, &shown)?;
        let edges = Edges::read(&device.file, device.size.0).context(OPERATION, &shown)?;
        let superblock = device.superblock().context(OPERATION, &shown)?;
        let content = content(&device.path, device.size, &edges, superblock.as_ref());
        if let Some(content) = content {
            return Err(Error::new(ErrorKind::AlreadyExists, OPERATION, &shown, content));
        }
        let partitions: Vec<String> = partitions(device.number).into_iter().map(|(_, name)| name).collect();
        if !partitions.is_empty() {
            let cause = format!(
                "the kernel still has its partitions {}, although there is no partition table",
                partitions.join(", ")
            );
            return Err(refused(ErrorKind::Busy, cause)
                .with_remedy(format!("remove them with `partx --delete {shown}`")));
        }
        Ok(Self { device, lock })
    }

    /// Returns the path of the device, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.device.path
    }

    /// Returns the size of the device.
    #[must_use]
    pub fn size(&self) -> Bytes {
        self.device.size
    }

    /// Gives up the exclusive claim, because mkfs.xfs claims the device itself. Start mkfs.xfs immediately and without `-f`:
    /// it then refuses a device on which another program has created something in the meantime.
    #[must_use]
    pub fn release(self) -> (PathBuf, FormatLock) {
        (self.device.path, self.lock)
    }
}

impl FormatLock {
    /// Locks a device. Returns its path without symbolic links as well.
    fn acquire(path: &Path) -> Result<(PathBuf, Self)> {
        // The descriptor must be writable: udev reads the device again when a writer closes it.
        let mut options = OpenOptions::new();
        let device = BlockDevice::open_with(path, options.read(true).write(true), 0, OPERATION)?;
        let lock =
            flock::exclusive(device.file, LOCK_TIMEOUT, OPERATION).map_err(|error| match error.kind() {
                ErrorKind::Busy => {
                    error.explain("another program holds the lock of the device, and may be formatting it")
                }
                _ => error,
            })?;
        Ok((device.path, Self { number: device.number, _lock: lock }))
    }
}

fn open_exclusively(path: &Path) -> Result<BlockDevice> {
    let mut options = OpenOptions::new();
    let opened = BlockDevice::open_with(path, options.read(true).write(true), libc::O_EXCL, OPERATION);
    opened.map_err(|error| {
        if error.errno() != Some(Errno::EBUSY as i32) {
            return error;
        }
        let users = BlockDevice::open(path, OPERATION).ok().and_then(|device| device.users());
        let users = users.unwrap_or("in use by another program".to_owned());
        error.explain(format!("the disk, or a partition of it, is {users}")).with_remedy("give another disk")
    })
}

/// Returns the loop devices that are bound to a disk or to a partition of it. The loop driver does not claim the device that
/// it is bound to, so `O_EXCL` does not notice it.
fn loop_users(device: &BlockDevice) -> Vec<String> {
    let mut numbers = vec![device.number];
    numbers.extend(partitions(device.number).into_iter().map(|(number, _)| number));
    bound_to(&numbers, loops_on_devices())
}

/// Returns the paths of the loop devices whose backing device is one of `numbers`.
fn bound_to(numbers: &[DeviceNumber], loops: impl IntoIterator<Item = LoopOnDevice>) -> Vec<String> {
    let mut users: Vec<String> = loops
        .into_iter()
        .filter(|user| numbers.contains(&user.backing))
        .map(|user| format!("/dev/loop{}", user.index))
        .collect();
    users.sort();
    users
}

/// Returns what is on a disk, and how to go on, or `None` if the disk is empty.
fn content(
    device: &Path,
    size: Bytes,
    edges: &Edges,
    superblock: Option<&Superblock>,
) -> Option<Explanation> {
    let first = edges.first_data()?;
    let begin = if first < EDGE { 0 } else { size.0 - EDGE };
    let erase = erase_command(device, begin);
    let found: Vec<String> = edges.signatures().iter().map(Signature::to_string).collect();
    let (cause, remedy) = if superblock.is_some_and(|superblock| superblock.in_progress) {
        (
            "mkfs.xfs was started on it and has not completed, so it has no file system".to_owned(),
            format!("if mkfs.xfs no longer runs, erase what it wrote with `{erase}`, and try again"),
        )
    } else if found.is_empty() {
        (
            format!("it is not empty: byte {first} is not zero"),
            format!("if the disk has nothing that is needed, erase that with `{erase}`, and try again"),
        )
    } else {
        (
            format!("it has {}", found.join(", ")),
            format!(
                "if nothing on the disk is needed, erase the signatures with `wipefs --all {}` and `{erase}`, and try again",
                device.display()
            ),
        )
    };
    Some(Explanation::from(cause).with_remedy(remedy))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::data_disk::superblock::tests::SECTOR;

    fn content_of(start: &[u8]) -> Option<Explanation> {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        std::fs::write(&image, start).unwrap();
        File::options().write(true).open(&image).unwrap().set_len(MIN_SIZE.0).unwrap();
        let file = File::open(&image).unwrap();
        let edges = Edges::read(&file, MIN_SIZE.0).unwrap();
        let superblock = Superblock::read(&file, MIN_SIZE.0).unwrap();
        content(Path::new("/dev/vdb"), MIN_SIZE, &edges, superblock.as_ref())
    }

    #[test]
    fn loop_devices_on_the_disk_and_on_its_partitions_are_users_of_it() {
        let number = |minor| DeviceNumber { major: 254, minor };
        let on = |index, minor| LoopOnDevice { index, backing: number(minor) };
        assert_eq!(
            bound_to(&[number(16), number(17)], [on(3, 17), on(1, 16), on(0, 32)]),
            ["/dev/loop1", "/dev/loop3"]
        );
    }

    #[test]
    fn zeros_are_no_content() {
        assert_eq!(content_of(&[]), None);
    }

    #[test]
    fn a_signature_is_named_with_its_offset_and_the_commands_that_erase_it() {
        let content = content_of(SECTOR).unwrap().to_string();
        assert!(
            content.contains("it has XFS (at byte 0)") && content.contains("wipefs --all /dev/vdb"),
            "{content}"
        );
        assert!(
            content.contains("blkdiscard --force --zeroout --offset 0 --length 4194304 /dev/vdb"),
            "{content}"
        );
    }

    #[test]
    fn a_byte_without_a_signature_is_content_too() {
        let content = content_of(&[&[0; 700][..], b"x"].concat()).unwrap().to_string();
        assert!(content.contains("byte 700 is not zero"), "{content}");
    }

    #[test]
    fn an_incomplete_mkfs_is_named_with_the_command_that_erases_it() {
        let mut sector = *SECTOR;
        sector[126] = 1;
        let content = content_of(&sector).unwrap().to_string();
        assert!(content.contains("has not completed") && content.contains("blkdiscard"), "{content}");
    }
}
