//! The enforcement of project limits by a file system.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;

use crate::error::{Error, ErrorKind, Explanation, Result};
use crate::sys::quotactl;

/// How a file system treats project quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// The kernel has no `quotactl_fd(2)` (before Linux 5.14).
    NoSyscall,
    /// The file system is mounted without project quotas, or the kernel was built without them.
    NoQuota,
    /// The file system counts usage (`pqnoenforce`) but does not enforce limits.
    AccountingOnly,
    /// The file system enforces limits.
    Enforcing,
}

impl Enforcement {
    /// Reads how the file system of `fs` treats project limits. The error has no explanation, because the explanation of other
    /// errors depends on this call.
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

    /// Returns `true` if the file system counts the usage of projects.
    pub(super) fn counts(self) -> bool {
        matches!(self, Self::AccountingOnly | Self::Enforcing)
    }

    /// Returns the problem and its remedy, or `None` if limits are enforced.
    pub(crate) fn problem(self) -> Option<(ErrorKind, Explanation)> {
        let (kind, cause, remedy) = match self {
            Self::Enforcing => return None,
            Self::NoSyscall => (
                ErrorKind::Unsupported,
                "the kernel has no quotactl_fd, or a seccomp filter blocks it",
                "Linux 5.14 or later is needed",
            ),
            Self::NoQuota => (
                ErrorKind::NotEnforced,
                "project quotas are off",
                "the file system must be XFS, mounted with option prjquota \
                 (a remount does not switch them on; the kernel needs CONFIG_XFS_QUOTA)",
            ),
            Self::AccountingOnly => (
                ErrorKind::NotEnforced,
                "usage is counted but limits are not enforced",
                "mount with option prjquota instead of pqnoenforce",
            ),
        };
        Some((kind, Explanation::of(cause, remedy)))
    }
}
