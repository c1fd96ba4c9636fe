//! Binding a file to an idle device, and checking that the kernel did what was asked.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{Mode, fstat};

use super::pool::{self, Pool};
use super::{Access, Binding, LoopDevice, Status, hint, node_name, open_node, read_status};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::loop_dev::{self, loop_config};
use crate::units::Bytes;

/// Whether I/O of the device bypasses the page cache of its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectIo {
    /// It must; otherwise data is cached twice and a flush is all that bounds the loss.
    #[default]
    Require,
    /// It should, where the file system can.
    Prefer,
    /// It must not.
    Off,
}

/// How to attach a file.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// Whether the device takes writes.
    pub access: Access,
    /// Whether the page cache is bypassed.
    pub direct_io: DirectIo,
    /// Logical block size in bytes: 512, 1024, 2048 or 4096. Always explicit, for the kernel's
    /// own choice depends on how the file was opened and on whether it was ever reflinked.
    pub block_size: u32,
    /// A label of at most 63 bytes that `losetup` shows as the backing file's name; it tells
    /// people whose device it is and means nothing to the kernel.
    pub label: String,
    /// How long to go on when devices are taken away by other programs.
    pub deadline: Duration,
}

impl AttachOptions {
    /// Direct I/O required, blocks of 512 bytes, ten seconds.
    #[must_use]
    pub fn new(access: Access) -> Self {
        Self {
            access,
            direct_io: DirectIo::Require,
            block_size: 512,
            label: String::new(),
            deadline: Duration::from_secs(10),
        }
    }

    /// Why a device that is bound already does not meet these options, if it does not.
    pub(super) fn mismatch(&self, status: &Status) -> Option<String> {
        if status.block_size != self.block_size {
            return Some(format!(
                "logical block size {} asked, {} granted",
                self.block_size, status.block_size
            ));
        }
        match (self.direct_io, status.direct_io) {
            (DirectIo::Require, false) => Some("direct I/O asked, buffered I/O granted".to_owned()),
            (DirectIo::Off, true) => Some("buffered I/O asked, direct I/O granted".to_owned()),
            _ => None,
        }
    }

    fn check(&self) -> Result<()> {
        let invalid =
            |detail: String| Err(Error::new(ErrorKind::InvalidInput, "attach", "a loop device", detail));
        if !(512..=4096).contains(&self.block_size) || !self.block_size.is_power_of_two() {
            return invalid(format!("block size {} is not 512, 1024, 2048 or 4096", self.block_size));
        }
        if self.label.len() > 63 || self.label.contains('\0') {
            return invalid(format!("label {:?} is over 63 bytes or holds a NUL", self.label));
        }
        Ok(())
    }
}

/// Opens the file behind a descriptor anew, with an open file description of its own.
pub(crate) fn reopen(file: BorrowedFd<'_>, flags: OFlag) -> std::result::Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    open(path.as_str(), flags | OFlag::O_CLOEXEC, Mode::empty())
}

/// The descriptor that the device will keep. O_DIRECT makes the kernel check alignment up front.
fn open_backing(image: BorrowedFd<'_>, options: &AttachOptions) -> Result<OwnedFd> {
    let access = match options.access {
        Access::ReadWrite => OFlag::O_RDWR,
        Access::ReadOnly => OFlag::O_RDONLY,
    };
    let buffered = || reopen(image, access).context("open", "the backing file");
    if options.direct_io == DirectIo::Off {
        return buffered();
    }
    match reopen(image, access | OFlag::O_DIRECT) {
        Ok(file) => Ok(file),
        Err(Errno::EINVAL) if options.direct_io == DirectIo::Prefer => buffered(),
        Err(Errno::EINVAL) => Err(Error::new(
            ErrorKind::NotHonoured,
            "attach",
            "the backing file",
            "direct I/O asked, and its file system has none",
        )),
        Err(errno) => Err(Error::sys("open", "the backing file", errno)),
    }
}

/// Binds `image`, which the caller knows not to be attached with this access.
pub(super) fn attach(
    control: BorrowedFd<'_>,
    pool: &Pool,
    image: BorrowedFd<'_>,
    options: &AttachOptions,
) -> Result<LoopDevice> {
    options.check()?;
    let backing = open_backing(image, options)?;
    let node_access = match options.access {
        Access::ReadWrite => OFlag::O_RDWR,
        Access::ReadOnly => OFlag::O_RDONLY,
    };
    let mut config = loop_config {
        fd: backing.as_raw_fd() as u32,
        block_size: options.block_size,
        info: loop_dev::empty_info(),
        __reserved: [0; 8],
    };
    config.info.lo_file_name[..options.label.len()].copy_from_slice(options.label.as_bytes());
    if options.access == Access::ReadOnly {
        config.info.lo_flags |= loop_dev::READ_ONLY;
    }
    if options.direct_io != DirectIo::Off {
        config.info.lo_flags |= loop_dev::DIRECT_IO;
    }

    let deadline = Instant::now() + options.deadline;
    let mut lost = 0u32;
    loop {
        let index = pool.take(control)?;
        // Kept by the file before the device is bound: a crash in between leaves a hint too many,
        // never a device that nobody finds. Without the right to write it, searches take longer.
        let hinted = hint::write(&backing, options.access, index).is_ok();
        let outcome =
            open_node(index, node_access).and_then(|fd| loop_dev::configure(&fd, &config).map(|()| fd));
        match outcome {
            Ok(fd) => {
                return verified(fd, index, &backing, options).inspect_err(|_| {
                    if hinted {
                        // Best effort: a hint without a device is only slower.
                        hint::clear(&backing, options.access).ok();
                    }
                    pool.give_back(index);
                });
            }
            // Bound by another program, being torn down, or removed: not ours, take the next.
            Err(Errno::EBUSY | Errno::ENXIO | Errno::ENODEV | Errno::ENOENT) if Instant::now() < deadline => {
                if !std::path::Path::new(&node_name(index)).exists() && pool::in_sysfs(index) {
                    pool.give_back(index);
                    let detail = "the kernel has the device and /dev has no node for it; \
                                  let this process see the host's /dev (devtmpfs)";
                    return Err(Error::new(ErrorKind::NotFound, "attach", node_name(index), detail));
                }
                lost += 1;
            }
            Err(errno) => {
                pool.give_back(index);
                let detail = format!("after {lost} devices that other programs took");
                let error = Error::sys("attach", node_name(index), errno);
                return Err(if lost > 0 { error.explain(detail) } else { error });
            }
        }
    }
}

/// Reads back what the kernel made of it; undoes the binding, which is this call's own, if it is
/// not what was asked.
fn verified(fd: OwnedFd, index: u32, backing: &OwnedFd, options: &AttachOptions) -> Result<LoopDevice> {
    let checked = (|| {
        let name = node_name(index);
        let status = read_status(&fd, index).context("read the status of", &name)?;
        let size = fstat(backing.as_fd()).context("fstat", "the backing file")?.st_size as u64;
        let whole = size - size % u64::from(options.block_size);
        let problem = if status.binding.access != options.access {
            Some(format!("{:?} asked, {:?} granted", options.access, status.binding.access))
        } else if status.size.0 < whole || status.size > Bytes(size) {
            Some(format!("the file has {size} bytes, the device {}", status.size.0))
        } else {
            options.mismatch(&status)
        };
        match problem {
            Some(problem) => Err(Error::new(ErrorKind::NotHonoured, "attach", name, problem)),
            None => Ok::<Binding, Error>(status.binding),
        }
    })();
    match checked {
        Ok(binding) => Ok(LoopDevice::new(fd, binding)),
        Err(error) => {
            // The binding was made by this call a moment ago, so clearing it takes nobody's device.
            loop_dev::clear(&fd).context("detach", node_name(index))?;
            Err(error)
        }
    }
}
