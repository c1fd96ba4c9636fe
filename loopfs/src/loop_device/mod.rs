//! Loop devices (loop(4)): a file shown as a block device.
//!
//! The kernel is the state. A device is known by the file it is bound to (device and inode
//! number), never by a path, and what was remembered about it is checked before each use.

use std::fmt;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{Mode, fstat};

use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::{block, loop_dev};
use crate::units::{Bytes, DeviceNumber};

mod attach;
mod control;
mod hint;
mod pool;

pub use attach::{AttachOptions, DirectIo};
pub use control::LoopControl;

pub(crate) use attach::reopen;
pub(crate) use hint::start as record_attachments;

/// Whether data may be changed through a device or descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads and writes.
    ReadWrite,
    /// Reads only; the kernel refuses writes at the block layer.
    ReadOnly,
}

/// Which file a loop device is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackingFile {
    /// `st_dev` of the file.
    pub device: DeviceNumber,
    /// `st_ino` of the file.
    pub inode: u64,
}

impl BackingFile {
    /// The identity of an open file.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn of(file: impl AsFd) -> Result<Self> {
        let status = fstat(file.as_fd()).context("fstat", "the backing file")?;
        Ok(Self { device: DeviceNumber::from_raw(status.st_dev), inode: status.st_ino })
    }
}

impl fmt::Display for BackingFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inode {} on device {}", self.inode, self.device)
    }
}

/// One attachment of a file to a device. It names the attachment and not the device: the same
/// index bound anew is another binding.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// N of `/dev/loopN`.
    pub index: u32,
    /// `BLKGETDISKSEQ` (Linux 5.15): differs for each attachment since boot.
    pub disk_sequence: Option<NonZeroU64>,
    /// The file.
    pub backing: BackingFile,
    /// Whether writes are refused.
    pub access: Access,
}

/// What the kernel reports of a bound device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Which attachment this is.
    pub binding: Binding,
    /// Size of the device.
    pub size: Bytes,
    /// Logical block size, in bytes.
    pub block_size: u32,
    /// Whether I/O bypasses the page cache of the backing file.
    pub direct_io: bool,
    /// Whether the kernel unbinds the device at its last close.
    pub auto_clear: bool,
}

/// What became of a detached device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detach {
    /// It is bound no more.
    Gone,
    /// Somebody has it open; the kernel unbinds it at the last close.
    Deferred,
}

/// A bound loop device, held open. Dropping it closes the descriptor and leaves the device
/// bound: a volume outlives the process that attached it.
#[derive(Debug)]
pub struct LoopDevice {
    fd: OwnedFd,
    binding: Binding,
}

impl LoopDevice {
    /// Opens the device and learns what it is bound to.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: no such device, or bound to nothing.
    pub fn open_index(index: u32) -> Result<Self> {
        let fd = open_node(index, OFlag::O_RDONLY).context("open", node_name(index))?;
        let binding = read_binding(&fd, index).map_err(|errno| match errno {
            Errno::ENXIO => Error::new(
                ErrorKind::NotFound,
                "open",
                node_name(index),
                "the loop device is bound to no file",
            ),
            errno => Error::sys("read the status of", node_name(index), errno),
        })?;
        Ok(Self { fd, binding })
    }

    /// Opens the device with this number. Minor numbers are not indices: the `max_part`
    /// parameter of the loop module shifts them.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: no loop device has the number, or it is bound to nothing.
    pub fn open_device_number(number: DeviceNumber) -> Result<Self> {
        let link = format!("/sys/dev/block/{number}");
        let target = std::fs::read_link(&link).context("resolve", &link)?;
        let name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let index = index_of_name(name).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "open device", number, format!("it is {name}, not a loop device"))
        })?;
        Self::open_index(index)
    }

    /// Opens the device a node stands for, wherever the node lies.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: not a block device. [`ErrorKind::NotFound`]: not a loop
    /// device, or bound to nothing.
    pub fn open_path(path: &std::path::Path) -> Result<Self> {
        let status = nix::sys::stat::stat(path).context("stat", path.display())?;
        if status.st_mode & libc::S_IFMT != libc::S_IFBLK {
            return Err(Error::new(ErrorKind::InvalidInput, "open", path.display(), "not a block device"));
        }
        Self::open_device_number(DeviceNumber::from_raw(status.st_rdev))
    }

    /// Opens the attachment and nothing else that the index may name by now.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: the attachment is gone.
    pub fn open_binding(binding: &Binding) -> Result<Self> {
        let device = Self::open_index(binding.index)?;
        if device.binding == *binding {
            return Ok(device);
        }
        let detail = format!("it is bound to {} now, not to {}", device.binding.backing, binding.backing);
        Err(Error::new(ErrorKind::NotFound, "open", node_name(binding.index), detail))
    }

    pub(crate) fn new(fd: OwnedFd, binding: Binding) -> Self {
        Self { fd, binding }
    }

    /// N of `/dev/loopN`.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.binding.index
    }

    /// Which attachment this is.
    #[must_use]
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// The node that devtmpfs or udev makes for the device.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(node_name(self.binding.index))
    }

    /// The device's number, as the kernel has it.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn device_number(&self) -> Result<DeviceNumber> {
        let status = fstat(self.fd.as_fd()).context("fstat", node_name(self.binding.index))?;
        Ok(DeviceNumber::from_raw(status.st_rdev))
    }

    /// What the kernel reports of the device now.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: unbound or bound anew since this was opened.
    #[doc(alias = "LOOP_GET_STATUS64")]
    pub fn status(&self) -> Result<Status> {
        self.check_binding()?;
        read_status(&self.fd, self.binding.index).context("read the status of", node_name(self.binding.index))
    }

    /// Makes the device as large as its file is now, and says how large that is. Online: readers
    /// and writers go on.
    ///
    /// # Errors
    /// [`ErrorKind::WouldShrink`]: the file has become smaller; the device is left as it was.
    /// [`ErrorKind::NotFound`]: as for [`status`](Self::status).
    #[doc(alias = "LOOP_SET_CAPACITY")]
    pub fn refresh_capacity(&self, file: impl AsFd) -> Result<Bytes> {
        self.check_binding()?;
        let name = node_name(self.binding.index);
        if BackingFile::of(&file)? != self.binding.backing {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "grow",
                name,
                "not the file the device is bound to",
            ));
        }
        let file_size = fstat(file.as_fd()).context("fstat", "the backing file")?.st_size as u64;
        let before = block::size(&self.fd).context("read the size of", &name)?;
        // The kernel shrinks a device under its user without a word.
        if file_size < before {
            let detail = format!("its file has {} of {before} bytes left; restore the file", file_size);
            return Err(Error::new(ErrorKind::WouldShrink, "grow", name, detail));
        }
        loop_dev::set_capacity(&self.fd).context("grow", &name)?;
        block::size(&self.fd).map(Bytes).context("read the size of", &name)
    }

    /// Takes back a detach that was [`Deferred`](Detach::Deferred): the device stays bound when
    /// its last user closes it. No effect on one that is not being detached.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: it is mounted, and the kernel (from Linux 6.19) changes nothing on a
    /// device that is held exclusively. [`ErrorKind::NotFound`]: gone by now.
    #[doc(alias = "LOOP_SET_STATUS64")]
    pub fn keep(&self) -> Result<()> {
        self.check_binding()?;
        let name = node_name(self.binding.index);
        let mut info = loop_dev::status(&self.fd).context("read the status of", &name)?;
        if info.lo_flags & loop_dev::AUTOCLEAR == 0 {
            return Ok(());
        }
        info.lo_flags &= !loop_dev::AUTOCLEAR;
        loop_dev::set_status(&self.fd, &info).context("take back the detach of", name)
    }

    /// Unbinds the device, if it still is the attachment this was opened as. From Linux 6.11 on
    /// the kernel always waits for the last close, so the descriptor goes with it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: the attachment was gone already.
    #[doc(alias = "LOOP_CLR_FD")]
    pub fn detach(self) -> Result<Detach> {
        self.check_binding()?;
        let Self { fd, binding } = self;
        match loop_dev::clear(&fd) {
            Ok(()) => {}
            // Another process was faster between the check and here.
            Err(Errno::ENXIO) => return Ok(Detach::Gone),
            Err(errno) => return Err(Error::sys("detach", node_name(binding.index), errno)),
        }
        drop(fd);
        match Self::open_binding(&binding) {
            Ok(_still_open) => Ok(Detach::Deferred),
            Err(error) if error.kind() == ErrorKind::NotFound || error.errno() == Some(libc::ENXIO) => {
                Ok(Detach::Gone)
            }
            Err(error) => Err(error),
        }
    }

    /// The index may have been unbound and given to another file while the descriptor was open.
    fn check_binding(&self) -> Result<()> {
        let name = node_name(self.binding.index);
        match read_binding(&self.fd, self.binding.index) {
            Ok(binding) if binding == self.binding => Ok(()),
            Ok(other) => Err(Error::new(
                ErrorKind::NotFound,
                "use",
                name,
                format!("bound to {} since, no longer to {}", other.backing, self.binding.backing),
            )),
            Err(Errno::ENXIO) => {
                Err(Error::new(ErrorKind::NotFound, "use", name, "bound to no file any more"))
            }
            Err(errno) => Err(Error::sys("read the status of", name, errno)),
        }
    }
}

impl AsFd for LoopDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn node_name(index: u32) -> String {
    format!("/dev/loop{index}")
}

fn index_of_name(name: &str) -> Option<u32> {
    name.strip_prefix("loop")?.parse().ok()
}

fn open_node(index: u32, access: OFlag) -> std::result::Result<OwnedFd, Errno> {
    open(node_name(index).as_str(), access | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK, Mode::empty())
}

fn read_binding(fd: impl AsFd, index: u32) -> std::result::Result<Binding, Errno> {
    let info = loop_dev::status(&fd)?;
    Ok(binding_of(&fd, index, &info))
}

fn binding_of(fd: impl AsFd, index: u32, info: &loop_dev::loop_info64) -> Binding {
    let read_only = info.lo_flags & loop_dev::READ_ONLY != 0;
    Binding {
        index,
        disk_sequence: block::disk_sequence(fd).ok().and_then(NonZeroU64::new),
        // The kernel fills lo_device with huge_encode_dev, which has stat(2)'s layout.
        backing: BackingFile { device: DeviceNumber::from_raw(info.lo_device), inode: info.lo_inode },
        access: if read_only { Access::ReadOnly } else { Access::ReadWrite },
    }
}

fn read_status(fd: impl AsFd, index: u32) -> std::result::Result<Status, Errno> {
    let info = loop_dev::status(&fd)?;
    Ok(Status {
        binding: binding_of(&fd, index, &info),
        size: Bytes(block::size(&fd)?),
        block_size: block::logical_block_size(&fd)?,
        direct_io: info.lo_flags & loop_dev::DIRECT_IO != 0,
        auto_clear: info.lo_flags & loop_dev::AUTOCLEAR != 0,
    })
}
