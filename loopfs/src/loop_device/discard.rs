//! Whether discards of a device reach its file, where they become holes.

use nix::errno::Errno;

use super::{LoopDevice, node_name};
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
        let limit = read(self.index(), DiscardLimit::Set)?;
        Ok(if limit == 0 { Discard::Mask } else { Discard::Allow })
    }

    /// Lets discards through or masks them, by `queue/discard_max_bytes` of the device in sysfs, and reads that back.
    /// Users of the device go on; those that run a file system with the mount option `discard` on it see it at their next mount.
    ///
    /// Before Linux 6.9 `LOOP_SET_STATUS64` of anybody lets discards through again; later ones keep the mask even
    /// when the index is bound to another file, and so an attachment always says what it wants
    /// ([`AttachOptions::discard`](super::AttachOptions::discard)).
    ///
    /// Writing zeroes is another thing: fallocate(2) with `FALLOC_FL_PUNCH_HOLE` on the node makes a hole masked or not, and the
    /// `BLKZEROOUT` of mkfs(8) makes none.
    ///
    /// # Errors
    /// [`ErrorKind::NotHonoured`]: the kernel did not do it. EROFS: `/sys` is mounted read-only, as in a container that is
    /// not privileged. ENOENT: it is not mounted. [`ErrorKind::NotFound`]: as for [`discard`](Self::discard).
    #[doc(alias = "discard_max_bytes")]
    pub fn set_discard(&self, discard: Discard) -> Result<()> {
        self.check_bound()?;
        set(self.index(), discard)
    }
}

/// Of a device that the caller has open, so that the index is no other's meanwhile.
pub(super) fn set(index: u32, discard: Discard) -> Result<()> {
    let found = match loop_dev::discard_limit(index, DiscardLimit::Set) {
        // Who has no /sys has masked nothing either.
        Err(Errno::ENOENT) if discard == Discard::Allow => return Ok(()),
        found => found.map_err(|errno| explained("read the discard limit of", index, errno))?,
    };
    let wanted = match (discard, found) {
        (Discard::Mask, 0) | (Discard::Allow, 1..) => return Ok(()),
        (Discard::Mask, _) => 0,
        (Discard::Allow, 0) => match most(index)? {
            // The file system under the file makes no holes.
            0 => return Ok(()),
            most => most,
        },
    };
    loop_dev::set_discard_limit(index, wanted)
        .map_err(|errno| explained("set the discard limit of", index, errno))?;
    match read(index, DiscardLimit::Set)? {
        set if (set == 0) == (wanted == 0) => Ok(()),
        other => {
            let detail = format!("discards of at most {wanted} bytes asked, {other} granted");
            Err(Error::new(ErrorKind::NotHonoured, "set the discard limit of", node_name(index), detail))
        }
    }
}

/// What the driver can take at once, in whole units of what it takes at all: the kernel refuses other limits.
fn most(index: u32) -> Result<u64> {
    let unit = read(index, DiscardLimit::Unit)?.max(1);
    let most = read(index, DiscardLimit::Hardware)?;
    Ok(most - most % unit)
}

fn read(index: u32, limit: DiscardLimit) -> Result<u64> {
    loop_dev::discard_limit(index, limit).context("read the discard limit of", node_name(index))
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
