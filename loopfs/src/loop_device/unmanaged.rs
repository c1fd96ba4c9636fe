//! Single calls to any loop device, for administration tools such as losetup(8).
//!
//! These functions give none of the guarantees of [`LoopControl`](super::LoopControl): they do not exclude concurrent calls, keep no
//! idle devices, read no property back from the kernel, and bind a file that already has a device. A program that attaches
//! images for its own use should call [`LoopControl::ensure_attached`](super::LoopControl::ensure_attached).
//!
//! The calls are those of loop(4) and need Linux 5.8. Each error has the [`errno`](crate::Error::errno) of the call that failed. A node
//! that does not belong to the loop driver fails with ENOTTY.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::binding::{Access, BackingFile, BackingRange};
use super::detach::request_detach;
use super::device::{BEYOND_ALL_INDICES, CONTROL, backing_in, check_node, index_at, node_name};
use crate::error::{Context, Error, Result};
use crate::sys::{loop_abi as abi, loop_dev};
use crate::units::DeviceNumber;

/// Returns the lowest index that is bound to no file, and creates the device if necessary. The index is not reserved:
/// another process may bind it first.
///
/// # Errors
/// ENOENT or ENODEV: the kernel has no loop driver. EACCES: the process may not open `/dev/loop-control`.
#[doc(alias = "LOOP_CTL_GET_FREE")]
pub fn find_free() -> Result<u32> {
    loop_dev::get_free(control()?).context("find a free device", CONTROL)
}

/// Creates device `index`.
///
/// # Errors
/// EEXIST: the device exists. EINVAL: no device can have this index. Those of [`find_free`].
#[doc(alias = "LOOP_CTL_ADD")]
pub fn add(index: u32) -> Result<()> {
    loop_dev::add(control()?, index).map(drop).context("add", node_name(index))
}

/// Removes device `index`. The kernel waits for RCU grace periods, about 45 ms.
///
/// # Errors
/// EBUSY: the device is bound or open. ENODEV: there is no such device. Those of [`find_free`].
#[doc(alias = "LOOP_CTL_REMOVE")]
pub fn remove(index: u32) -> Result<()> {
    loop_dev::remove(control()?, index).context("remove", node_name(index))
}

fn control() -> Result<OwnedFd> {
    loop_dev::open_control().context("open", CONTROL)
}

/// Returns the indices of all bound devices, in the order of `/sys/block`.
///
/// # Errors
/// Those of open(2): sysfs is not mounted.
pub fn bound_indices() -> Result<Vec<u32>> {
    let indices = loop_dev::indices_in_sysfs_order().context("list", "/sys/block")?;
    let inodes = loop_dev::attachment_inodes(&indices).context("list", "/sys/devices/virtual/block")?;
    let bound = indices.into_iter().zip(inodes).filter(|(_, inode)| inode.is_some());
    Ok(bound.map(|(index, _)| index).collect())
}

/// Returns the index of the device of a node at any path. Returns `None` if the path is not a node of a loop device.
#[must_use]
pub fn index_of(path: &Path) -> Option<u32> {
    index_at(path).ok()
}

/// The properties of an attachment that [`Device::set_up`] makes.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Whether the device refuses writes. A file that is open for reading only gets a read-only device.
    pub access: Access,
    /// The part of the file that the device maps.
    pub range: BackingRange,
    /// The logical block size in bytes; `None` lets the kernel choose.
    pub block_size: Option<u32>,
    /// Whether I/O bypasses the page cache of the file. The kernel ignores the request if the file cannot do it.
    pub direct_io: bool,
    /// Whether the kernel scans the partition table.
    pub partition_scan: bool,
    /// The name that the kernel keeps with the device, at most 63 bytes of it.
    pub name: OsString,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            access: Access::ReadWrite,
            range: BackingRange::default(),
            block_size: None,
            direct_io: false,
            partition_scan: false,
            name: OsString::new(),
        }
    }
}

/// What sysfs and `LOOP_GET_STATUS64` report of a device. A property is `None` if the device is not bound, or if the process may
/// not read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// The path of the file, followed by ` (deleted)` if the file was deleted.
    pub backing_path: Option<PathBuf>,
    /// The identity of the file. Only a process that may open the device can read it.
    pub backing: Option<BackingFile>,
    /// The number of the block device that the device is bound to. Otherwise as `backing`.
    pub backing_device: Option<DeviceNumber>,
    /// The name that was given when the device was set up; see [`Setup::name`].
    pub name: Option<OsString>,
    /// Where the device begins in the file, in bytes.
    pub offset: Option<u64>,
    /// The size limit in bytes, 0 for none.
    pub size_limit: Option<u64>,
    /// The logical block size in bytes.
    pub block_size: Option<u64>,
    /// Whether the kernel unbinds the device at its last close.
    pub auto_clear: bool,
    /// Whether the kernel scans the partition table.
    pub partition_scan: bool,
    /// Whether the device refuses writes.
    pub read_only: bool,
    /// Whether I/O bypasses the page cache of the file.
    pub direct_io: bool,
}

/// Reads the attributes of device `index`. They need not belong to the same attachment if the device is bound again concurrently.
#[must_use]
pub fn attributes(index: u32) -> Attributes {
    let text = |name: &str| loop_dev::attribute_bytes(index, name).ok();
    let number = |name: &str| String::from_utf8(text(name)?).ok()?.parse().ok();
    let flag = |name: &str| text(name).is_some_and(|value| value == b"1");
    let info = loop_dev::open_device(index, false).and_then(loop_dev::status).ok();
    let name = info.as_ref().map(|info| {
        let name = info.lo_file_name.split(|byte| *byte == 0).next().unwrap_or_default();
        OsString::from_vec(name.to_vec())
    });
    Attributes {
        backing_path: text("loop/backing_file").map(|path| PathBuf::from(OsString::from_vec(path))),
        backing: info.as_ref().map(|info| backing_in(info).0),
        // 0 for a file.
        backing_device: info
            .filter(|info| info.lo_rdevice != 0)
            .map(|info| DeviceNumber::from_raw(info.lo_rdevice)),
        name: name.filter(|name| !name.is_empty()),
        offset: number("loop/offset"),
        size_limit: number("loop/sizelimit"),
        block_size: number("queue/logical_block_size"),
        auto_clear: flag("loop/autoclear"),
        partition_scan: flag("loop/partscan"),
        read_only: flag("ro"),
        direct_io: flag("loop/dio"),
    }
}

/// Returns the file that device `index` is bound to, and whether the device is read-only.
pub(super) fn backing_of(index: u32) -> Option<(BackingFile, Access)> {
    loop_dev::open_device(index, false).and_then(loop_dev::status).ok().map(|info| backing_in(&info))
}

/// An open node of a loop device, bound or not.
#[derive(Debug)]
pub struct Device {
    fd: OwnedFd,
    name: String,
}

impl Device {
    /// Opens device `index`.
    ///
    /// # Errors
    /// ENOENT: there is no such device or node. ENXIO: the kernel unbinds or removes the device at this moment.
    /// An error without an errno: the node belongs to another device.
    pub fn open_index(index: u32, access: Access) -> Result<Self> {
        let name = node_name(index);
        let fd = loop_dev::open_device(index, access == Access::ReadWrite).context("open", &name)?;
        check_node(&fd, index)?;
        Ok(Self { fd, name })
    }

    /// Opens a node at any path. The calls fail with ENOTTY if it does not belong to the loop driver.
    ///
    /// # Errors
    /// Those of open(2); see [`open_index`](Self::open_index).
    pub fn open_path(path: &Path, access: Access) -> Result<Self> {
        let mode = if access == Access::ReadWrite { OFlag::O_RDWR } else { OFlag::O_RDONLY };
        let name = path.display().to_string();
        let fd =
            open(path, mode | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK, Mode::empty()).context("open", &name)?;
        Ok(Self { fd, name })
    }

    /// Binds the device to a file. If the call fails, the function does not detach the device, because another process may have
    /// bound it.
    ///
    /// # Errors
    /// EBUSY: the device is bound. EINVAL: the file is neither a regular file nor a block device, or the block size is
    /// not a power of two from 512 to the page size. EBADF: the file is not open for reading.
    #[doc(alias = "LOOP_CONFIGURE")]
    pub fn set_up(&self, file: impl AsFd, setup: &Setup) -> Result<()> {
        let mut config = abi::config(file.as_fd().as_raw_fd(), setup.block_size.unwrap_or_default());
        let flags = [
            (setup.access == Access::ReadOnly, abi::READ_ONLY),
            (setup.direct_io, abi::DIRECT_IO),
            (setup.partition_scan, abi::PARTITION_SCAN),
        ];
        config.info.lo_flags =
            flags.iter().filter(|(wanted, _)| *wanted).fold(0, |all, (_, flag)| all | flag);
        config.info.lo_offset = setup.range.offset;
        config.info.lo_sizelimit = setup.range.size_limit.map_or(0, std::num::NonZeroU64::get);
        let name = setup.name.as_bytes().iter().take(abi::LABEL_SIZE);
        config.info.lo_file_name.iter_mut().zip(name).for_each(|(to, from)| *to = *from as _);
        self.call("LOOP_CONFIGURE", |fd| loop_dev::configure(fd, &config))
    }

    /// Requests that the kernel detaches the file at the last close of the device, so drop the `Device` to complete the detach. No
    /// write is lost, as with [`LoopDevice::detach`](super::LoopDevice::detach).
    ///
    /// # Errors
    /// ENXIO: the device is bound to no file. EIO: the kernel could not write the page cache of the device to the file, and the
    /// detach is not requested.
    #[doc(alias = "LOOP_CLR_FD")]
    pub fn detach(&self) -> Result<()> {
        let (index, flags) = match loop_dev::status(&self.fd) {
            Ok(info) => (info.lo_number, info.lo_flags),
            Err(errno @ (Errno::ENXIO | Errno::ENOTTY)) => {
                return Err(Error::sys("LOOP_GET_STATUS64", &self.name, errno));
            }
            // The kernel asks the file, whose server may be unreachable. No device has this index.
            Err(_) => (BEYOND_ALL_INDICES, 0),
        };
        request_detach(&self.fd, index, flags, &self.name)
    }

    /// Cancels a detach that the kernel has deferred to the last close.
    ///
    /// # Errors
    /// ENXIO: the device is bound to no file. EBUSY (Linux 6.19): a process has the device open exclusively.
    #[doc(alias = "LOOP_SET_STATUS64")]
    pub fn cancel_detach(&self) -> Result<()> {
        self.call("LOOP_SET_STATUS64", |fd| {
            let mut info = loop_dev::status(fd)?;
            if info.lo_flags & abi::AUTOCLEAR == 0 {
                return Ok(());
            }
            info.lo_flags &= !abi::AUTOCLEAR;
            loop_dev::set_status(fd, &info)
        })
    }

    /// Sets the capacity of the device to the current size of its file, even if the file has become smaller.
    ///
    /// # Errors
    /// ENXIO: the device is bound to no file.
    #[doc(alias = "LOOP_SET_CAPACITY")]
    pub fn refresh_capacity(&self) -> Result<()> {
        self.call("LOOP_SET_CAPACITY", |fd| loop_dev::set_capacity(fd))
    }

    /// Makes I/O bypass the page cache of the file, or use it (Linux 4.10).
    ///
    /// # Errors
    /// ENXIO: the device is bound to no file. EINVAL: the file, its offset or the block size does not allow direct I/O.
    #[doc(alias = "LOOP_SET_DIRECT_IO")]
    pub fn set_direct_io(&self, enabled: bool) -> Result<()> {
        self.call("LOOP_SET_DIRECT_IO", |fd| loop_dev::set_direct_io(fd, enabled))
    }

    /// Sets the logical block size in bytes (Linux 4.14).
    ///
    /// # Errors
    /// ENXIO: the device is bound to no file. EINVAL: not a power of two from 512 to the page size. EAGAIN: the kernel could
    /// not write all cached data in time.
    #[doc(alias = "LOOP_SET_BLOCK_SIZE")]
    pub fn set_block_size(&self, bytes: u32) -> Result<()> {
        self.call("LOOP_SET_BLOCK_SIZE", |fd| loop_dev::set_block_size(fd, bytes))
    }

    fn call(
        &self,
        operation: &'static str,
        call: impl FnOnce(BorrowedFd<'_>) -> std::result::Result<(), Errno>,
    ) -> Result<()> {
        call(self.fd.as_fd()).map_err(|errno| Error::sys(operation, &self.name, errno))
    }
}

#[cfg(test)]
mod tests {
    use super::super::model_tests::image;
    use super::*;
    use crate::sys::loop_dev::reset;

    #[test]
    fn a_deferred_detach_is_cancelled() {
        reset(|_| {});
        let index = find_free().unwrap();
        let [device, user] = [(); 2].map(|()| Device::open_index(index, Access::ReadWrite).unwrap());
        device.set_up(image(), &Setup::default()).unwrap();
        device.detach().unwrap();
        assert!(attributes(index).auto_clear);
        user.cancel_detach().unwrap();
        assert!(!attributes(index).auto_clear);
    }
}
