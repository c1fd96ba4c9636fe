//! Enabling and disabling the discards of a device. An enabled discard makes a hole in the file of the device.
//!
//! `docs/decisions/0004-discards-disabled-in-sysfs.md` gives the reasons.

use std::os::fd::AsFd;

use nix::errno::Errno;

use super::device::{LoopDevice, node_name};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::loop_abi::DiscardLimit;
use crate::sys::loop_dev;

/// The handling of discards by a device (`BLKDISCARD`, fstrim(8), those of a virtual machine's guest).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Discard {
    /// A discard makes a hole in the file, if its file system can: the blocks are free again.
    #[default]
    Enabled,
    /// The device rejects discards (EOPNOTSUPP), so that a preallocated file keeps its blocks.
    Disabled,
}

impl LoopDevice {
    /// Returns [`Discard::Enabled`] if discards are enabled. Returns [`Discard::Disabled`] also for a device whose file cannot have holes.
    ///
    /// # Errors
    /// ENOENT: `/sys` is not mounted. [`ErrorKind::NotFound`]: the device was detached since this was opened, and may be bound
    /// again.
    #[doc(alias = "discard_max_bytes")]
    pub fn discard(&self) -> Result<Discard> {
        self.bound_info()?;
        current(self, self.index())
    }

    /// Calls `change` and keeps discards disabled if they were. Before Linux 6.9 `LOOP_SET_STATUS64` enables them. After a crash
    /// in between they stay enabled until the file is attached again.
    pub(super) fn keeping_discard(&self, change: impl FnOnce() -> Result<()>) -> Result<()> {
        let before = current(self, self.index());
        change()?;
        match before {
            Ok(Discard::Disabled) => set(self, self.index(), Discard::Disabled).map(drop),
            // Without /sys and a writable descriptor the limit can neither be read nor set again.
            Ok(Discard::Enabled) | Err(_) => Ok(()),
        }
    }
}

const OPERATION: &str = "set the discard limit of";

/// The result of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiscardOutcome {
    Done,
    /// Discards are enabled again only after the device is removed and added again.
    StaysDisabled,
}

/// Enables or disables discards, and reads that back. The device is open, so its index cannot be reused during the call.
///
/// The setting belongs to the index, not to the binding. Before Linux 6.9 a new binding and each `LOOP_SET_STATUS64` enable
/// discards. Later kernels keep them disabled, and newer ones (6.18) do so until the index is removed. An attachment therefore
/// always requests a setting, and never gets an index on which discards cannot be enabled as requested.
pub(super) fn set(device: impl AsFd, index: u32, wanted: Discard) -> Result<DiscardOutcome> {
    let found = match current(device, index) {
        // Without /sys discards could not have been disabled either.
        Err(error) if wanted == Discard::Enabled && error.errno() == Some(Errno::ENOENT as i32) => {
            return Ok(DiscardOutcome::Done);
        }
        found => found?,
    };
    match (wanted, found) {
        (Discard::Disabled, Discard::Disabled) | (Discard::Enabled, Discard::Enabled) => {
            Ok(DiscardOutcome::Done)
        }
        (Discard::Disabled, Discard::Enabled) => {
            write(index, 0)?;
            match read(index, DiscardLimit::Set)? {
                0 => Ok(DiscardOutcome::Done),
                granted => {
                    let detail = format!("discards stay enabled, up to {granted} bytes");
                    Err(Error::new(ErrorKind::NotHonoured, OPERATION, node_name(index), detail))
                }
            }
        }
        (Discard::Enabled, Discard::Disabled) => enable(index),
    }
}

/// Returns the current handling of discards by an open device. Queries the device itself, which takes a tenth of the time of
/// sysfs. If the device is open for reading only, reads sysfs.
pub(super) fn current(device: impl AsFd, index: u32) -> Result<Discard> {
    let enabled = match loop_dev::takes_discards(device) {
        Some(enabled) => enabled,
        None => {
            let limit = loop_dev::discard_limit(index, DiscardLimit::Set);
            limit.map_err(|errno| explained("read the discard limit of", index, errno))? > 0
        }
    };
    Ok(if enabled { Discard::Enabled } else { Discard::Disabled })
}

fn enable(index: u32) -> Result<DiscardOutcome> {
    let most = read(index, DiscardLimit::Hardware)?;
    if most == 0 {
        // The file system of the file cannot make holes.
        return Ok(DiscardOutcome::Done);
    }
    // The kernel rejects values that are no multiple of the unit. From some version on it reports no unit while discards are
    // disabled, and rejects everything except 0.
    let unit = read(index, DiscardLimit::Unit)?;
    if unit == 0 {
        return Ok(DiscardOutcome::StaysDisabled);
    }
    write(index, most - most % unit)?;
    let enabled = read(index, DiscardLimit::Set)? > 0;
    Ok(if enabled { DiscardOutcome::Done } else { DiscardOutcome::StaysDisabled })
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
            error.with_remedy("let this process see /sys of the host, and write to it")
        }
        _ => error,
    }
}
