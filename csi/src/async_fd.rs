//! Waits for a descriptor without blocking a thread.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor with the event loop.
///
/// # Errors
/// EPERM: the kernel cannot report events of such a descriptor, for example of a regular file. ENOSPC, ENOMEM: see epoll_ctl(2).
#[expect(
    deprecated,
    reason = "the successor is unsafe, which this crate forbids; it is for types that may close or change their \
              descriptor, and an OwnedFd does neither"
)]
pub(crate) fn register(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, interest)
}
