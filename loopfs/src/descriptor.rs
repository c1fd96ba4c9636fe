//! Open file descriptions. Offsets, access modes and locks (open(2), flock(2)) belong to a description, not to a descriptor.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

/// Opens the file of a descriptor again, with a new open file description.
pub(crate) fn reopen(file: BorrowedFd<'_>, flags: OFlag) -> std::result::Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    open(path.as_str(), flags | OFlag::O_CLOEXEC, Mode::empty())
}
