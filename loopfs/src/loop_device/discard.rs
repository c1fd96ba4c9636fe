//! Whether discards of a device reach its file, where they become holes.

use std::os::fd::AsFd;

use nix::errno::Errno;

use super::device::{LoopDevice, node_name};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::loop_dev::{self, DiscardLimit};

/// What becomes of a discard (`BLKDISCARD`, fstrim(8), the guest of a virtual machine) of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Discard {
    /// It makes a hole in the file, where the file system can: the blocks are free for others.
    #[default]
    Allow,
    /// The device takes none (EOPNOTSUPP), so that a preallocated file keeps its blocks.
    Mask,
}

impl LoopDevice {
    /// What becomes of discards now. Of a device whose file cannot have holes, [`Discard::Mask`].
    ///
    /// # Errors
    /// ENOENT where `/sys` is not mounted. [`ErrorKind::NotFound`]: unbound or bound anew since this was opened.
    #[doc(alias = "discard_max_bytes")]
    pub fn discard(&self) -> Result<Discard> {
        self.check_bound()?;
        current(self, self.index())
    }

    /// Has the mask outlast `change`, which before Linux 6.9 drops it: `LOOP_SET_STATUS64`. A crash in between leaves the device
    /// without it until the file is attached again.
    pub(super) fn keeping_discard(&self, change: impl FnOnce() -> Result<()>) -> Result<()> {
        let before = current(self, self.index());
        change()?;
        match before {
            Ok(Discard::Mask) => set(self, self.index(), Discard::Mask).map(drop),
            // Without /sys and a descriptor for writing a mask cannot be seen, and could not be set again either.
            Ok(Discard::Allow) | Err(_) => Ok(()),
        }
    }

    /// Lets discards through or masks them, by `queue/discard_max_bytes` of the device in sysfs, and reads that back. Users of
    /// the device go on; a file system on it that was mounted with the option `discard` before may log what is refused.
    ///
    /// The mask is the index's and not the binding's. Before Linux 6.9 a new binding and `LOOP_SET_STATUS64` of anybody
    /// drop it; later kernels keep it, and newer ones (6.18) until the index is removed. An attachment therefore always
    /// says what it wants ([`AttachOptions::discard`](super::AttachOptions::discard)), and never gets an index that
    /// would mask what it wants to let through.
    ///
    /// Writing zeroes is another thing: fallocate(2) with `FALLOC_FL_PUNCH_HOLE` on the node makes a hole masked or not, and the
    /// `BLKZEROOUT` of mkfs(8) makes none.
    ///
    /// # Errors
    /// [`ErrorKind::NotHonoured`]: the kernel did not do it; of a mask that it keeps, too. EROFS: `/sys` is mounted
    /// read-only, as in a container that is not privileged. ENOENT: it is not mounted. [`ErrorKind::NotFound`]: as for
    /// [`discard`](Self::discard).
    #[doc(alias = "discard_max_bytes")]
    pub fn set_discard(&self, discard: Discard) -> Result<()> {
        self.check_bound()?;
        match set(self, self.index(), discard)? {
            Outcome::Done => Ok(()),
            Outcome::StaysDisabled => {
                let detail = "this kernel keeps the mask for the life of the index; detach the file and attach it again";
                Err(Error::new(ErrorKind::NotHonoured, OPERATION, node_name(self.index()), detail))
            }
        }
    }
}

const OPERATION: &str = "set the discard limit of";

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// Only a device that is made anew lets discards through.
    StaysDisabled,
}

/// Of an open device, so that the index is no other's meanwhile.
pub(super) fn set(device: impl AsFd, index: u32, wanted: Discard) -> Result<Outcome> {
    let found = match current(device, index) {
        // Nor could it be masked without /sys.
        Err(error) if wanted == Discard::Allow && error.errno() == Some(Errno::ENOENT as i32) => {
            return Ok(Outcome::Done);
        }
        found => found?,
    };
    match (wanted, found) {
        (Discard::Mask, Discard::Mask) | (Discard::Allow, Discard::Allow) => Ok(Outcome::Done),
        (Discard::Mask, Discard::Allow) => {
            write(index, 0)?;
            match read(index, DiscardLimit::Set)? {
                0 => Ok(Outcome::Done),
                granted => {
                    let detail = format!("no discards asked, such of {granted} bytes granted");
                    Err(Error::new(ErrorKind::NotHonoured, OPERATION, node_name(index), detail))
                }
            }
        }
        (Discard::Allow, Discard::Mask) => unmask(index),
    }
}

/// What becomes of discards of an open device. The device itself is asked, in a tenth of the time that sysfs takes; of one that
/// is open for reading only, sysfs.
fn current(device: impl AsFd, index: u32) -> Result<Discard> {
    let takes = match loop_dev::takes_discards(device) {
        Some(takes) => takes,
        None => {
            let limit = loop_dev::discard_limit(index, DiscardLimit::Set);
            limit.map_err(|errno| explained("read the discard limit of", index, errno))? > 0
        }
    };
    Ok(if takes { Discard::Allow } else { Discard::Mask })
}

fn unmask(index: u32) -> Result<Outcome> {
    let most = read(index, DiscardLimit::Hardware)?;
    if most == 0 {
        // The file system under the file makes no holes.
        return Ok(Outcome::Done);
    }
    // The kernel refuses what is no multiple of the unit; from some version on it has none for a masked device, and so
    // refuses everything but 0.
    let unit = read(index, DiscardLimit::Unit)?;
    if unit == 0 {
        return Ok(Outcome::StaysDisabled);
    }
    write(index, most - most % unit)?;
    let unmasked = read(index, DiscardLimit::Set)? > 0;
    Ok(if unmasked { Outcome::Done } else { Outcome::StaysDisabled })
}

fn read(index: u32, limit: DiscardLimit) -> Result<u64> {
    loop_dev::discard_limit(index, limit).context("read the discard limit of", node_name(index))
}

fn write(index: u32, limit: u64) -> Result<()> {
    loop_dev::set_discard_limit(index, limit).map_err(|errno| explained(OPERATION, index, errno))
}

fn explained(operation: &'static str, index: u32, errno: Errno) -> Error {
    let error = Error::sys(operation, node_name(index), errno);
    match errno {
        Errno::EROFS | Errno::EACCES | Errno::ENOENT => {
            error.explain("let this process see /sys of the host, and write to it")
        }
        _ => error,
    }
}
