//! What tests break on purpose.

use std::os::fd::AsFd;

use crate::error::{Context, Result};
use crate::sys::xfs;

/// Shuts an XFS down as an I/O error does, its log unwritten (`XFS_IOC_GOINGDOWN`). It is as before once it is unmounted and
/// mounted again.
///
/// # Errors
/// Those of the ioctl.
pub fn shut_down_xfs(file: impl AsFd) -> Result<()> {
    xfs::go_down(file).context("shut down", "an XFS")
}
