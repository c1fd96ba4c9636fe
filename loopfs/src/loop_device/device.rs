//! A bound device, held open, and what the kernel reports of it.

use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::{fstat, stat};

use super::binding::{Access, BackingFile, BackingRange, Binding};
use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::sys::loop_abi::{self as abi, loop_info64};
use crate::sys::loop_dev;
use crate::units::{Bytes, DeviceNumber};

/// Why a device without a node cannot be opened. The library has tried to create the node.
pub(super) const NO_NODE: Explanation = Explanation::of(
    "the kernel has the device, /dev has no node for it, and this process could not create one",
    "let it see the host's /dev (devtmpfs), or create nodes there (CAP_MKNOD, device cgroup `b 7:* rwm`)",
);

/// The device cgroup of a container denies the loop driver.
pub(super) const NOT_ALLOWED: Explanation = Explanation::of(
    "the device cgroup of this container denies it",
    "allow the devices `b 7:* rwm` and `c 10:237 rwm`, or make the container privileged",
);

/// Why a device cannot be queried.
pub(super) const DOES_NOT_RESPOND: Explanation = Explanation::of(
    "it does not respond: a process is changing it, or the file system of its file does not respond",
    "end that process, or restore or detach that file system",
);

/// If the node of a device in `/dev` is that of another one.
const NODE_REMEDY: &str = "create it again, or let this process see the host's /dev (devtmpfs)";

/// The node that adds and removes devices.
pub(super) const CONTROL: &str = "/dev/loop-control";

/// Minor numbers have 20 bits.
pub(super) const BEYOND_ALL_INDICES: u32 = 1 << 20;

/// What the kernel reports of a bound device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Which attachment this is. The path by which its file was opened is in
    /// [`unmanaged::attributes`](super::unmanaged::attributes).
    pub binding: Binding,
    /// Size of the device.
    pub size: Bytes,
    /// Logical block size, in bytes.
    pub block_size: u32,
    /// Whether I/O bypasses the page cache of the backing file.
    pub direct_io: bool,
    /// Whether the kernel unbinds the device at its last close.
    pub auto_clear: bool,
    /// Whether the kernel has been told to scan the content of the device for partitions.
    pub partition_scan: bool,
    /// What [`AttachOptions::label`](super::AttachOptions::label) set, or the path that another program gave.
    pub label: String,
}

impl Status {
    /// Returns `true` if the device was attached with this label, of which the kernel keeps the first 63 bytes.
    #[must_use]
    pub fn is_labelled(&self, label: &str) -> bool {
        self.label == fitting_label(label)
    }
}

/// Returns the whole characters of a label that fit into the kernel's field (`lo_file_name`).
pub(super) fn fitting_label(label: &str) -> &str {
    // `str::floor_char_boundary` does this since Rust 1.91.
    let end = (0..=label.len().min(abi::LABEL_SIZE)).rev().find(|end| label.is_char_boundary(*end));
    &label[..end.unwrap_or(0)]
}

/// An open loop device that is bound to a file. Dropping it closes the descriptor. The device stays bound after that, unless it was
/// attached with [`Lifetime::AutoClear`](super::Lifetime::AutoClear), so it outlives the process that attached it.
#[derive(Debug)]
pub struct LoopDevice {
    pub(super) fd: OwnedFd,
    pub(super) binding: Binding,
}

impl LoopDevice {
    /// Opens the device for reading and reads what it is bound to.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is no such device, or it is not bound.
    pub fn open_index(index: u32) -> Result<Self> {
        Self::open(index, Access::ReadOnly)
    }

    pub(super) fn open(index: u32, access: Access) -> Result<Self> {
        let fd = open_device(index, access == Access::ReadWrite)?;
        read_binding(&fd, index).map(|binding| Self { fd, binding })
    }

    /// Opens the same attachment for writing if it is writable, as [`LoopControl::attach`] returns it.
    pub(super) fn into_writable(self) -> Result<Self> {
        if self.binding.access == Access::ReadOnly {
            return Ok(self);
        }
        // While this one is open the index cannot be given to another file.
        let writable = Self::open(self.index(), Access::ReadWrite).map_err(|error| {
            if error.errno() == Some(Errno::EBUSY as i32) {
                error.explain("it is mounted, and this kernel lets no mounted device be opened for writing")
            } else {
                error
            }
        })?;
        self.check_binding(&writable.binding)?;
        Ok(writable)
    }

    /// Opens the device with this number. Minor numbers are not indices: the `max_part`
    /// parameter of the loop module shifts them.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: no loop device has the number, or it is bound to nothing.
    pub fn open_device_number(number: DeviceNumber) -> Result<Self> {
        index_of_number(number).and_then(Self::open_index)
    }

    /// Opens the device of a node at any path.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: not a block device. [`ErrorKind::NotFound`]: not a loop
    /// device, or bound to nothing.
    pub fn open_path(path: &Path) -> Result<Self> {
        index_at(path).and_then(Self::open_index)
    }

    /// Opens an attachment, and no later attachment of the same index.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: the attachment no longer exists.
    pub fn open_binding(binding: &Binding) -> Result<Self> {
        let device = Self::open_index(binding.index)?;
        if device.binding.is_same(binding) {
            return Ok(device);
        }
        let detail = format!("it is bound to {} now; {} was attached before", device.binding, binding);
        Err(Error::new(ErrorKind::NotFound, "open", node_name(binding.index), detail))
    }

    pub(super) fn new(fd: OwnedFd, binding: Binding) -> Self {
        Self { fd, binding }
    }

    /// Returns N of `/dev/loopN`.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.binding.index
    }

    /// Returns the attachment.
    #[must_use]
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// Returns the path of the node of the device. Where `/dev` is a copy without devtmpfs, the library created it there when it
    /// opened the device.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(node_name(self.binding.index))
    }

    /// Returns the paths of the nodes of the partitions, in the order of their numbers. The kernel has scanned the device when
    /// [`attach`](super::LoopControl::attach) returns, if that was [requested](super::AttachOptions::partition_scan).
    ///
    /// # Errors
    /// ENOENT: `/sys` is not mounted; or a node is missing or belongs to another device, as in a `/dev` that is a copy.
    pub fn partitions(&self) -> Result<Vec<PathBuf>> {
        let index = self.index();
        let names = loop_dev::partitions(index).context("list the partitions of", node_name(index))?;
        let number = |name: &String| name.rsplit('p').next().and_then(|number| number.parse::<u32>().ok());
        let mut numbered: Vec<_> = names.iter().filter_map(|name| Some((number(name)?, name))).collect();
        numbered.sort_unstable();
        let node = |(_, name): (u32, &String)| {
            let path = PathBuf::from("/dev").join(name);
            // A node of another device would be written to.
            match loop_dev::open_partition(index, name) {
                Ok(_is_that_of_the_partition) => Ok(path),
                Err(errno) => {
                    let cause = "the node is missing, or that of another device";
                    let error = Error::sys("open the partition", path.display(), errno).explain(cause);
                    Err(error.with_remedy("use the /dev of the host"))
                }
            }
        };
        numbered.into_iter().map(node).collect()
    }

    /// Returns the device number.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn device_number(&self) -> Result<DeviceNumber> {
        loop_dev::device_number(&self.fd)
            .map(DeviceNumber::from_raw)
            .context("fstat", node_name(self.binding.index))
    }

    /// Returns the current status of the device.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: the device was detached since this was opened, and may be bound again.
    #[doc(alias = "LOOP_GET_STATUS64")]
    pub fn status(&self) -> Result<Status> {
        let status = read_status(&self.fd, self.binding.index)?;
        self.check_binding(&status.binding)?;
        Ok(status)
    }

    /// Returns the current status. Checks that the device is still the attachment that it was opened as: an index can be bound to another
    /// file while a descriptor is open.
    pub(super) fn bound_info(&self) -> Result<loop_info64> {
        let info = read_info(&self.fd, self.binding.index)?;
        self.check_binding(&binding_of(&self.fd, self.binding.index, &info))?;
        Ok(info)
    }

    pub(super) fn check_binding(&self, now: &Binding) -> Result<()> {
        if now.is_same(&self.binding) {
            return Ok(());
        }
        let detail = format!("bound to {now} since, no longer to {}", self.binding);
        Err(Error::new(ErrorKind::NotFound, "use", node_name(self.binding.index), detail))
    }

    /// Refreshes the capacity of the device from the size of its file, and returns it. Readers and writers are not interrupted.
    ///
    /// # Errors
    /// [`ErrorKind::WouldShrink`]: the file has become smaller; the device is unchanged.
    /// [`ErrorKind::NotFound`]: as for [`status`](Self::status).
    #[doc(alias = "LOOP_SET_CAPACITY")]
    pub fn refresh_capacity(&self, file: impl AsFd) -> Result<Bytes> {
        // Not the range with which it was opened, because another process can change it.
        let Status { binding, size: before, .. } = self.status()?;
        let name = node_name(binding.index);
        if BackingFile::of(&file)? != binding.backing {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "refresh the capacity of",
                name,
                "the device is bound to another file",
            ));
        }
        let file_size = fstat(file.as_fd()).context("fstat", "the backing file")?.st_size as u64;
        let shown = file_size.saturating_sub(binding.range.offset);
        // The kernel would silently shrink a device in use.
        if shown < before.0 {
            let cause = format!("its file has only {shown} of {} bytes left", before.0);
            return Err(Error::new(ErrorKind::WouldShrink, "refresh the capacity of", name, cause)
                .with_remedy("restore the file")
                .with_sizes(Bytes(shown), before));
        }
        loop_dev::set_capacity(&self.fd).context("refresh the capacity of", &name)?;
        loop_dev::size(&self.fd).map(Bytes).context("read the size of", &name)
    }
}

impl AsFd for LoopDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

pub(super) fn node_name(index: u32) -> String {
    format!("/dev/loop{index}")
}

fn index_of_number(number: DeviceNumber) -> Result<u32> {
    let link = format!("/sys/dev/block/{number}");
    let target = std::fs::read_link(&link).context("resolve", &link)?;
    let name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_prefix("loop").and_then(|index| index.parse().ok()).ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "open device", number, format!("it is {name}, not a loop device"))
    })
}

/// Returns the index of the device of a node at any path.
pub(super) fn index_at(path: &Path) -> Result<u32> {
    let status = stat(path).context("stat", path.display())?;
    if status.st_mode & libc::S_IFMT != libc::S_IFBLK {
        return Err(Error::new(ErrorKind::InvalidInput, "open", path.display(), "not a block device"));
    }
    index_of_number(DeviceNumber::from_raw(status.st_rdev))
}

/// Returns the file that a device with this status is bound to, and whether the device is read-only.
pub(super) fn backing_in(info: &loop_info64) -> (BackingFile, Access) {
    // The kernel fills lo_device with huge_encode_dev, which has stat(2)'s layout.
    let backing = BackingFile { device: DeviceNumber::from_raw(info.lo_device), inode: info.lo_inode };
    (backing, if info.lo_flags & abi::READ_ONLY != 0 { Access::ReadOnly } else { Access::ReadWrite })
}

fn binding_of(fd: impl AsFd, index: u32, info: &loop_info64) -> Binding {
    let (backing, access) = backing_in(info);
    Binding {
        index,
        disk_sequence: loop_dev::disk_sequence(fd).ok().and_then(NonZeroU64::new),
        backing,
        range: BackingRange { offset: info.lo_offset, size_limit: NonZeroU64::new(info.lo_sizelimit) },
        access,
    }
}

pub(super) fn open_device(index: u32, writable: bool) -> Result<OwnedFd> {
    loop_dev::open_device(index, writable).map_err(|errno| match errno {
        // It is being detached.
        Errno::ENXIO => unbound(index),
        Errno::EPERM => Error::sys("open", node_name(index), errno).explain(NOT_ALLOWED),
        _ => Error::sys("open", node_name(index), errno),
    })
}

/// Checks that an open node belongs to the device that its name says. The device may be bound to no file. A node that was made
/// before the loop module was loaded with another `max_part` belongs to another device.
pub(super) fn check_node(fd: impl AsFd, index: u32) -> Result<()> {
    match (loop_dev::device_number(fd), loop_dev::number(index)) {
        (Ok(found), Ok(expected)) if found != expected => {
            let [found, expected] = [found, expected].map(DeviceNumber::from_raw);
            let cause = format!("the node has the number {found}, and the device {expected}");
            Err(Error::new(ErrorKind::Other, "open", node_name(index), cause)
                .with_remedy(format!("remove the node and {NODE_REMEDY}")))
        }
        // Without sysfs, the number of the device is unknown.
        _ => Ok(()),
    }
}

fn unbound(index: u32) -> Error {
    Error::new(ErrorKind::NotFound, "open", node_name(index), "the loop device is bound to no file")
}

/// Reads the status of the device, and checks that the node belongs to the device that its name says.
pub(super) fn read_info(fd: impl AsFd, index: u32) -> Result<loop_info64> {
    let info = loop_dev::status(fd).map_err(|errno| match errno {
        Errno::ENXIO => unbound(index),
        _ => Error::sys("read the status of", node_name(index), errno),
    })?;
    if info.lo_number == index {
        return Ok(info);
    }
    let cause = format!("the node belongs to loop{}", info.lo_number);
    Err(Error::new(ErrorKind::Other, "open", node_name(index), cause).with_remedy(NODE_REMEDY))
}

pub(super) fn read_binding(fd: impl AsFd, index: u32) -> Result<Binding> {
    read_info(&fd, index).map(|info| binding_of(&fd, index, &info))
}

pub(super) fn read_status(fd: impl AsFd, index: u32) -> Result<Status> {
    let info = read_info(&fd, index)?;
    let failed = "read the status of";
    let label = info.lo_file_name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(Status {
        binding: binding_of(&fd, index, &info),
        size: Bytes(loop_dev::size(&fd).context(failed, node_name(index))?),
        block_size: loop_dev::logical_block_size(&fd).context(failed, node_name(index))?,
        direct_io: info.lo_flags & abi::DIRECT_IO != 0,
        auto_clear: info.lo_flags & abi::AUTOCLEAR != 0,
        partition_scan: info.lo_flags & abi::PARTITION_SCAN != 0,
        label: String::from_utf8_lossy(label).into_owned(),
    })
}
