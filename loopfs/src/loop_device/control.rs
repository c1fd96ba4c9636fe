//! `/dev/loop-control`, and the search for the device of a file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, open};
use nix::sys::stat::Mode;

use super::attach::{self, AttachOptions};
use super::hint::{self, Hint};
use super::pool::{self, Pool};
use super::{Access, BackingFile, Detach, LoopDevice, Status, node_name, open_node, read_status};
use crate::error::{Context, Error, ErrorKind, Result};

const CONTROL: &str = "/dev/loop-control";

/// Attaches files to loop devices and finds the devices of files. One for each process.
///
/// Calls for the same file exclude each other, between processes too, by flock(2) on the file.
#[derive(Debug)]
pub struct LoopControl {
    control: OwnedFd,
    pool: Pool,
}

impl LoopControl {
    /// Opens `/dev/loop-control` and takes over the idle devices of earlier processes.
    ///
    /// # Errors
    /// ENOENT: the loop module is not loaded, or `/dev` is not the host's. EACCES, EPERM: without
    /// the right to the node.
    pub fn open() -> Result<Self> {
        let control = open(CONTROL, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()).map_err(|errno| {
            let error = Error::sys("open", CONTROL, errno);
            match errno {
                Errno::ENOENT => {
                    error.explain("load the loop module, and let this process see the host's /dev")
                }
                _ => error,
            }
        })?;
        Ok(Self { control, pool: Pool::recover()? })
    }

    /// The device `image` is attached to with this access; attaches it first where there is none.
    /// Safe to repeat and to call from many processes: there is one device for each access.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: attached with other properties than those asked.
    /// [`ErrorKind::NotHonoured`]: the kernel did not grant a property; nothing is left attached.
    /// [`ErrorKind::Busy`]: other programs took every device until the deadline.
    #[doc(alias = "LOOP_CONFIGURE")]
    pub fn ensure_attached(&self, image: BorrowedFd<'_>, options: &AttachOptions) -> Result<LoopDevice> {
        let _lock = lock(image)?;
        if let Some(device) = self.find_access(image, options.access)? {
            let status = device.status()?;
            if let Some(problem) = options.mismatch(&status) {
                let name = node_name(device.index());
                return Err(Error::new(ErrorKind::AlreadyExists, "attach", name, problem));
            }
            // It may be on its way out, kept only by somebody who has it open.
            device.keep()?;
            return Ok(device);
        }
        attach::attach(self.control.as_fd(), &self.pool, image, options)
    }

    /// The devices bound to the file `image` is: at most one that takes writes and one that does
    /// not, if only this library attaches it.
    ///
    /// # Errors
    /// ENOENT where `/sys` is not mounted.
    pub fn find(&self, image: BorrowedFd<'_>) -> Result<Vec<LoopDevice>> {
        let mut found = Vec::new();
        for access in [Access::ReadWrite, Access::ReadOnly] {
            found.extend(self.find_access(image, access)?);
        }
        Ok(found)
    }

    /// Detaches every device of the file. [`Detach::Deferred`] if one of them is still open
    /// somewhere.
    ///
    /// # Errors
    /// Those of [`LoopDevice::detach`], except that a device gone already is no error.
    pub fn detach_all(&self, image: BorrowedFd<'_>) -> Result<Detach> {
        let _lock = lock(image)?;
        let mut outcome = Detach::Gone;
        for device in self.find(image)? {
            let binding = device.binding().clone();
            match device.detach() {
                Ok(Detach::Deferred) => {
                    outcome = Detach::Deferred;
                    self.pool.give_back_later(binding.index);
                }
                Ok(Detach::Gone) => {
                    self.pool.give_back(binding.index);
                    // Best effort: a hint without a device is only slower.
                    hint::clear(image, binding.access).ok();
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(outcome)
    }

    /// What every bound loop device of the machine is bound to, whoever bound it.
    ///
    /// # Errors
    /// ENOENT where `/sys` is not mounted.
    pub fn snapshot(&self) -> Result<Vec<Status>> {
        let mut bound = Vec::new();
        for index in pool::indices()? {
            let status = open_node(index, OFlag::O_RDONLY).and_then(|fd| read_status(fd, index));
            match status {
                Ok(status) => bound.push(status),
                // Idle, being torn down, or removed since the listing.
                Err(Errno::ENXIO | Errno::ENOENT | Errno::ENODEV) => {}
                Err(errno) => return Err(Error::sys("read the status of", node_name(index), errno)),
            }
        }
        Ok(bound)
    }

    /// How many idle devices are kept for the next attachments.
    #[must_use]
    pub fn idle(&self) -> usize {
        self.pool.idle()
    }

    /// Removes idle devices until `keep` are left; answers how many went. Each idle device holds
    /// some 136 KiB of kernel memory. Blocks for about 45 ms for each batch of 32.
    #[doc(alias = "LOOP_CTL_REMOVE")]
    pub fn trim(&self, keep: usize) -> usize {
        self.pool.trim(self.control.as_fd(), keep)
    }

    fn find_access(&self, image: BorrowedFd<'_>, access: Access) -> Result<Option<LoopDevice>> {
        let backing = BackingFile::of(image)?;
        let bound = |index: u32| match LoopDevice::open_index(index) {
            Ok(device) if device.binding().backing == backing && device.binding().access == access => {
                Some(device)
            }
            _ => None,
        };
        match hint::read(image, access) {
            Hint::NotAttached => return Ok(None),
            Hint::Index(index) => {
                if let Some(device) = bound(index) {
                    return Ok(Some(device));
                }
            }
            Hint::Absent => {}
        }
        Ok(pool::indices()?.into_iter().find_map(bound))
    }
}

/// Excludes other calls for the same file. On an open file description of its own, for the one
/// handed to the kernel lives as long as the device and would keep the lock.
fn lock(image: BorrowedFd<'_>) -> Result<Flock<OwnedFd>> {
    let file = attach::reopen(image, OFlag::O_RDONLY).context("open", "the backing file")?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, errno)| Error::sys("lock", "the backing file", errno))
}
