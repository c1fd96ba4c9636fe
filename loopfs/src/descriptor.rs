//! Open file descriptions. Offsets, access modes and locks (open(2), flock(2)) belong to a description, not to a descriptor.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

/// Returns the path of a symbolic link to the file of a descriptor, whatever the name of the file is now.
pub(crate) fn link(file: impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
}

/// Opens the file of a descriptor again, with a new open file description.
pub(crate) fn reopen(file: BorrowedFd<'_>, flags: OFlag) -> std::result::Result<OwnedFd, Errno> {
    open(link(file).as_str(), flags | OFlag::O_CLOEXEC, Mode::empty())
}
