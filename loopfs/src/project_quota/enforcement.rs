//! Whether a file system enforces project limits.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;

use crate::error::{Error, ErrorKind, Result};
use crate::sys::quotactl;

/// Whether a file system counts and enforces project quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// The kernel has no `quotactl_fd(2)` (before Linux 5.14).
    NoSyscall,
    /// Mounted without project quotas, or the kernel was built without them.
    NoQuota,
    /// Usage is counted (`pqnoenforce`), limits are not enforced.
    AccountingOnly,
    /// Limits are enforced.
    Enforcing,
}

impl Enforcement {
    /// Reads what the file system of `fs` does with project limits. The error is not explained: the explanation of an
    /// error asks for this.
    pub(super) fn of(fs: BorrowedFd<'_>) -> Result<Self> {
        if !quotactl::syscall_exists() {
            return Ok(Self::NoSyscall);
        }
        match quotactl::state(fs) {
            Ok(state) if state.flags & quotactl::FS_QUOTA_PDQ_ENFD != 0 => Ok(Self::Enforcing),
            Ok(state) if state.flags & quotactl::FS_QUOTA_PDQ_ACCT != 0 => Ok(Self::AccountingOnly),
            // XFS without a quota mount option returns ENOSYS, other file systems EINVAL or ESRCH.
            Ok(_) | Err(Errno::ENOSYS | Errno::EINVAL | Errno::ESRCH | Errno::EOPNOTSUPP) => {
                Ok(Self::NoQuota)
            }
            Err(errno) => Err(Error::sys("read the quota state of", "the file system", errno)),
        }
    }

    /// Returns the problem and its remedy, or `None` if limits are enforced.
    pub(crate) fn problem(self) -> Option<(ErrorKind, &'static str)> {
        match self {
            Self::Enforcing => None,
            Self::NoSyscall => Some((
                ErrorKind::Unsupported,
                "the kernel has no quotactl_fd, or a seccomp filter hides it; Linux 5.14 or later is needed",
            )),
            Self::NoQuota => Some((
                ErrorKind::NotEnforced,
                "project quotas are off: the file system must be XFS, mounted with option prjquota \
                 (a remount does not switch them on; the kernel needs CONFIG_XFS_QUOTA)",
            )),
            Self::AccountingOnly => Some((
                ErrorKind::NotEnforced,
                "project quotas are counted and not enforced: mount with option prjquota instead of pqnoenforce",
            )),
        }
    }
}
