//! Faults that tests inject.

use std::os::fd::AsFd;

use crate::error::{Context, Result};
use crate::sys::{freeze as sys, xfs};

/// Shuts an XFS down as an I/O error does, without writing its log (`XFS_IOC_GOINGDOWN`). Unmounting and mounting it
/// again restores it.
///
/// # Errors
/// The errors of the ioctl.
pub fn shut_down_xfs(file: impl AsFd) -> Result<()> {
    xfs::go_down(file).context("shut down", "an XFS")
}

/// Freezes a file system (`FIFREEZE`). Calls that write to it wait until it is thawed.
///
/// # Errors
/// The errors of the ioctl.
pub fn freeze(file: impl AsFd) -> Result<()> {
    sys::freeze(file).context("freeze", "a file system")
}

/// Thaws a file system (`FITHAW`).
///
/// # Errors
/// The errors of the ioctl.
pub fn thaw(file: impl AsFd) -> Result<()> {
    sys::thaw(file).context("thaw", "a file system")
}
