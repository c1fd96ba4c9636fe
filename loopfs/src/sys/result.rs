//! The result of a system call.

use nix::errno::Errno;

pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// Converts the errno of rustix into that of nix, which the rest of the library uses.
pub(super) fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}
