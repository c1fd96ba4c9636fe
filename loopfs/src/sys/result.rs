//! The result of a system call.

use nix::errno::Errno;

pub(crate) type Result<T> = std::result::Result<T, Errno>;
