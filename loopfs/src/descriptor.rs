//! Open file descriptions: offsets, access modes and locks (open(2), flock(2)) belong to them, not to descriptors.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

/// Opens the file of a descriptor again, with an open file description of its own.
pub(crate) fn reopen(file: BorrowedFd<'_>, flags: OFlag) -> std::result::Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    open(path.as_str(), flags | OFlag::O_CLOEXEC, Mode::empty())
}
