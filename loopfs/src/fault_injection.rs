//! What tests break on purpose.

use std::os::fd::AsFd;

use crate::error::{Context, Result};
use crate::sys::{freeze as sys, xfs};

/// Shuts an XFS down as an I/O error does, its log unwritten (`XFS_IOC_GOINGDOWN`). It is as before once it is unmounted and
/// mounted again.
///
/// # Errors
/// Those of the ioctl.
pub fn shut_down_xfs(file: impl AsFd) -> Result<()> {
    xfs::go_down(file).context("shut down", "an XFS")
}

/// Freezes a file system (`FIFREEZE`): whatever writes to it waits until it is thawed.
///
/// # Errors
/// Those of the ioctl.
pub fn freeze(file: impl AsFd) -> Result<()> {
    sys::freeze(file).context("freeze", "a file system")
}

/// Thaws a file system (`FITHAW`).
///
/// # Errors
/// Those of the ioctl.
pub fn thaw(file: impl AsFd) -> Result<()> {
    sys::thaw(file).context("thaw", "a file system")
}
