//! The quotas of one file system, the project of one inode, and why the kernel refused a call about them: the same errno has
//! several causes here, and each has its own remedy.

use std::fmt;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::limits::{self, Limits, ProjectId, StoredLimits, Usage};
use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::sys::{self, fsxattr, getdents, quotactl, xfs};

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

/// The project quotas of one mounted file system (quotactl_fd(2), Linux 5.14).
///
/// Borrows any descriptor on that file system; `O_PATH` is enough, except for
/// [`finish_inactivation`](Self::finish_inactivation).
///
/// # Errors
/// What all functions here have in common; the error says what to do:
///
/// | [`ErrorKind`] | errno | cause |
/// |---|---|---|
/// | `Unsupported` | ENOSYS | no `quotactl_fd`: a kernel before Linux 5.14, or a seccomp filter |
/// | `NotEnforced` | ENOSYS, ESRCH, EINVAL | the file system has no project quotas or is mounted without them |
/// | `NotEnforced` | | they are counted only (`pqnoenforce`), and a limit was to be set |
/// | `PermissionDenied` | EPERM | no `CAP_SYS_ADMIN`; reading the quota of a project needs it too |
/// | `InUserNamespace` | EPERM, EINVAL | the process is not in the initial user namespace |
/// | `ReadOnly` | EROFS | a change through a read-only mount, or of a read-only file system |
/// | `Other` | EIO | the file system has shut down |
#[derive(Clone, Copy, Debug)]
pub struct ProjectQuota<'fs> {
    fs: BorrowedFd<'fs>,
}

impl<'fs> ProjectQuota<'fs> {
    /// The quotas of the file system that `fs` is on.
    #[must_use]
    pub fn of(fs: BorrowedFd<'fs>) -> Self {
        Self { fs }
    }

    /// What the file system does with project limits (`Q_XGETQSTATV`, Linux 3.12). Needs no capability.
    ///
    /// # Errors
    /// EIO if the file system has shut down. EPERM only from a seccomp filter.
    #[doc(alias = "Q_XGETQSTATV")]
    pub fn enforcement(&self) -> Result<Enforcement> {
        // The error has no explanation, because the explanation of other errors depends on this call.
        if !quotactl::syscall_exists() {
            return Ok(Enforcement::NoSyscall);
        }
        match quotactl::state(self.fs) {
            Ok(state) if state.flags & quotactl::FS_QUOTA_PDQ_ENFD != 0 => Ok(Enforcement::Enforcing),
            Ok(state) if state.flags & quotactl::FS_QUOTA_PDQ_ACCT != 0 => Ok(Enforcement::AccountingOnly),
            // XFS without a quota mount option returns ENOSYS, other file systems EINVAL or ESRCH.
            Ok(_) | Err(Errno::ENOSYS | Errno::EINVAL | Errno::ESRCH | Errno::EOPNOTSUPP) => {
                Ok(Enforcement::NoQuota)
            }
            Err(errno) => Err(Error::sys("read the quota state of", "the file system", errno)),
        }
    }

    /// Fails unless limits are enforced, and says what to do.
    ///
    /// # Errors
    /// [`ErrorKind::NotEnforced`], or [`ErrorKind::Unsupported`] where the kernel has no `quotactl_fd`.
    pub fn require_enforcing(&self) -> Result<()> {
        match self.enforcement()?.problem() {
            None => Ok(()),
            Some((kind, problem)) => Err(Error::new(kind, "use the quotas of", "the file system", problem)),
        }
    }

    /// Returns the usage and limits of a project, or `None` if the id has neither (`Q_XGETQUOTA`).
    ///
    /// # Errors
    /// Those of [`ProjectQuota`].
    #[doc(alias = "Q_XGETQUOTA")]
    pub fn usage(&self, id: ProjectId) -> Result<Option<Usage>> {
        match quotactl::get(self.fs, id.get()) {
            Ok(quota) => Ok(Some(Usage::read(id, &quota))),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => self.explain(Err(errno), "read the quota of project", id),
        }
    }

    /// Sets the requested limits, leaves the others unchanged, and reads them back (`Q_XSETQLIM`). The file system rounds
    /// bytes up to its block size; what it keeps is returned. A limit below the usage is allowed and stops
    /// further growth.
    ///
    /// The change is in the journal, and durable, no later than the next syncfs(2) of the file system.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: a limit of 0, which means unlimited to the kernel. [`ErrorKind::NotHonoured`]: the file
    /// system keeps less than was requested. And those of [`ProjectQuota`].
    #[doc(alias = "Q_XSETQLIM")]
    pub fn set_limits(&self, id: ProjectId, limits: Limits) -> Result<StoredLimits> {
        let mut quota = limits::request(id, limits)?;
        // If usage is only counted, the kernel would nevertheless accept the limit.
        if limits.restrict() {
            self.require_enforcing()?;
        }
        if quota.fieldmask != 0 {
            self.explain(quotactl::set_limits(self.fs, &mut quota), "limit project", id)?;
        }
        let stored = self.usage(id)?.map_or(StoredLimits::UNLIMITED, |usage| usage.limits);
        if !limits::honoured(limits, &stored) {
            let detail = format!("{limits:?} requested, {stored:?} stored by the file system");
            return Err(Error::new(ErrorKind::NotHonoured, "limit project", id, detail));
        }
        Ok(stored)
    }

    /// Removes all limits. An id without limits and usage is unused again.
    ///
    /// # Errors
    /// As [`set_limits`](Self::set_limits), but where usage is only counted this works.
    pub fn clear_limits(&self, id: ProjectId) -> Result<()> {
        self.set_limits(id, Limits::UNLIMITED).map(drop)
    }

    /// Returns `true` if projects without limits get the limits of id 0. Returns `false` if the process may not read them: it
    /// cannot set limits either.
    ///
    /// # Errors
    /// Those of [`ProjectQuota`].
    #[cfg(feature = "volume-store")]
    pub(crate) fn has_default_limits(&self) -> Result<bool> {
        match quotactl::get(self.fs, 0) {
            Ok(stored) => {
                Ok([stored.blk_softlimit, stored.blk_hardlimit, stored.ino_softlimit, stored.ino_hardlimit]
                    != [0; 4])
            }
            Err(Errno::ENOENT | Errno::EPERM | Errno::EACCES) => Ok(false),
            Err(errno) => self.explain(Err(errno), "read the default limits of", "projects"),
        }
    }

    /// Returns the number of blocks with quota records of projects (`Q_XGETQSTATV`). XFS frees none of them.
    ///
    /// # Errors
    /// Those of [`ProjectQuota`].
    #[doc(alias = "Q_XGETQSTATV")]
    pub fn record_blocks(&self) -> Result<u64> {
        let state = self.explain(quotactl::state(self.fs), "read the quota state of", "the file system")?;
        Ok(state.project.nblks)
    }

    /// Every id of `range` that has usage or limits, in order (`Q_XGETNEXTQUOTA`).
    ///
    /// # Errors
    /// The iterator yields one error and ends; errno as for [`usage`](Self::usage).
    #[doc(alias = "Q_XGETNEXTQUOTA")]
    pub fn ids(&self, range: RangeInclusive<ProjectId>) -> impl Iterator<Item = Result<Usage>> + use<'fs> {
        let fs = self.fs;
        let last = range.end().get();
        let mut next = Some(range.start().get());
        let counts =
            |enforcement| matches!(enforcement, Enforcement::AccountingOnly | Enforcement::Enforcing);
        std::iter::from_fn(move || {
            let from = next.take()?;
            match quotactl::get_next(fs, from) {
                // Past the largest id the kernel starts again at 0, and of 4294967295 itself it
                // returns EINVAL: the search requests neither.
                Ok(quota) if quota.id >= from && quota.id <= last => {
                    next = (quota.id < last).then_some(quota.id + 1);
                    ProjectId::new(quota.id).map(|id| Ok(Usage::read(id, &quota)))
                }
                Ok(_) | Err(Errno::ENOENT) => None,
                // The end by the manual page. Without project quotas the kernel returns it too.
                Err(Errno::ESRCH) if Self::of(fs).enforcement().is_ok_and(counts) => None,
                Err(errno) => {
                    Some(explain(Err(errno), Interface::Quota(fs), "list the quotas after project", from))
                }
            }
        })
    }

    /// Finishes the frees that XFS defers, so that the usage of `id` counts no deleted file but
    /// those still open, and no block past the end of a file (`XFS_IOC_FREE_EOFBLOCKS`).
    ///
    /// Reading the quota of id 0 only hastens those frees since Linux 5.19, it does not wait.
    ///
    /// # Errors
    /// EBADF, as [`ErrorKind::InvalidInput`]: the descriptor is `O_PATH`. ENOTTY, as
    /// [`ErrorKind::Unsupported`]: the file system is not XFS. EPERM, as [`ErrorKind::PermissionDenied`] or
    /// [`ErrorKind::InUserNamespace`]: no `CAP_SYS_ADMIN`. EROFS, as [`ErrorKind::ReadOnly`]: the file system
    /// is read-only; that one mount of it is does not matter here.
    #[doc(alias = "XFS_IOC_FREE_EOFBLOCKS")]
    pub fn finish_inactivation(&self, id: ProjectId) -> Result<()> {
        let freed = xfs::free_eof_blocks(self.fs, id.get());
        explain(freed, Interface::Xfs, "finish the deferred frees of project", id)
    }

    fn explain<T>(
        &self,
        result: sys::Result<T>,
        operation: &'static str,
        object: impl fmt::Display,
    ) -> Result<T> {
        explain(result, Interface::Quota(self.fs), operation, object)
    }
}

/// The project id of an open file or directory, 0 where none was set (`FS_IOC_FSGETXATTR`,
/// ioctl_xfs_fsgetxattr(2)). Needs no capability.
///
/// # Errors
/// EBADF, as [`ErrorKind::InvalidInput`]: an `O_PATH` descriptor. ENOTTY or EOPNOTSUPP, as
/// [`ErrorKind::Unsupported`]: the file system has no such attribute.
#[doc(alias = "FS_IOC_FSGETXATTR")]
pub fn project_of(file: impl AsFd) -> Result<u32> {
    let id = fsxattr::get(file).map(|attributes| attributes.fsx_projid);
    explain(id, Interface::Attributes, "read the project id of", "a file")
}

/// As [`project_of`], and returns `true` if new files in the directory inherit its project id (`FS_XFLAG_PROJINHERIT`).
pub(crate) fn project_and_inheritance_of(directory: impl AsFd) -> Result<(u32, bool)> {
    let read = fsxattr::get(directory)
        .map(|found| (found.fsx_projid, found.fsx_xflags & fsxattr::FS_XFLAG_PROJINHERIT != 0));
    explain(read, Interface::Attributes, "read the project id of", "a directory")
}

/// Puts an empty directory into a project: new files in it inherit the id
/// (`FS_IOC_FSSETXATTR` with `FS_XFLAG_PROJINHERIT`). Read back. Does nothing if that was done before, so the call can be
/// repeated. Entries that already exist would stay outside: [`tag_tree`](crate::project_tree::tag_tree) puts a directory into a
/// project with its content.
///
/// # Errors
/// [`ErrorKind::InvalidInput`]: it is not a directory, or has entries, and is unchanged. EPERM, as [`ErrorKind::PermissionDenied`]: the caller neither owns the directory nor has `CAP_FOWNER`.
/// EINVAL or EPERM, as [`ErrorKind::InUserNamespace`]: project ids can be changed only in the initial user
/// namespace only. EBADF, as [`ErrorKind::InvalidInput`]: an `O_PATH` descriptor. ENOTTY or EOPNOTSUPP, as
/// [`ErrorKind::Unsupported`]: the file system has no project ids. EROFS, as [`ErrorKind::ReadOnly`], also
/// through a read-only mount. [`ErrorKind::NotHonoured`]: the id did not stick.
#[doc(alias = "FS_IOC_FSSETXATTR")]
pub fn assign_project(directory: impl AsFd, id: ProjectId) -> Result<()> {
    let directory = directory.as_fd();
    if project_and_inheritance_of(directory)? == (id.get(), true) {
        return Ok(());
    }
    require_empty_directory(directory, id)?;
    set_project(directory, id)
}

fn require_empty_directory(directory: BorrowedFd<'_>, id: ProjectId) -> Result<()> {
    const OPERATION: &str = "put a directory into project";
    let refuse = |cause, remedy| {
        Err(Error::new(ErrorKind::InvalidInput, OPERATION, id, Explanation::of(cause, remedy)))
    };
    // Through another descriptor, because the position in the list of entries belongs to the caller's.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let entries = match openat(directory, c".", flags, Mode::empty()) {
        Err(Errno::ENOTDIR) => {
            return refuse("the descriptor is a file", "only a directory can limit its content");
        }
        opened => opened.and_then(getdents::read).context(OPERATION, id)?,
    };
    if entries.iter().any(|entry| !matches!(entry.name.as_bytes(), b"." | b"..")) {
        return refuse(
            "the directory has entries, which would stay outside the project",
            "put it there with tag_tree or limit_directory, or `loopfs quota tag`",
        );
    }
    Ok(())
}

/// As [`assign_project`], for a directory with any content, which stays in its project.
pub(crate) fn set_project(directory: BorrowedFd<'_>, id: ProjectId) -> Result<()> {
    let read =
        || explain(fsxattr::get(directory), Interface::Attributes, "read the project id of", "a directory");
    let mut attributes = read()?;
    attributes.fsx_projid = id.get();
    attributes.fsx_xflags |= fsxattr::FS_XFLAG_PROJINHERIT;
    let set = fsxattr::set(directory, &attributes);
    explain(set, Interface::Attributes, "put a directory into project", id)?;
    let stored = read()?;
    // Without the inherit flag nothing below the directory would be limited.
    if stored.fsx_projid != id.get() || stored.fsx_xflags & fsxattr::FS_XFLAG_PROJINHERIT == 0 {
        let detail =
            format!("the directory kept id {} and flags {:#x}", stored.fsx_projid, stored.fsx_xflags);
        return Err(Error::new(ErrorKind::NotHonoured, "put a directory into project", id, detail));
    }
    Ok(())
}

/// The inode of the initial user namespace in nsfs, the same on every kernel (`USER_NS_INIT_INO` of
/// linux/nsfs.h). A map of all ids in `/proc/self/uid_map` is no evidence, because a nested namespace can have one too.
const INITIAL_USER_NAMESPACE: u64 = 0xefff_fffd;

/// Which interface refused.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Interface<'fs> {
    /// `quotactl_fd(2)` on the file system of this descriptor.
    Quota(BorrowedFd<'fs>),
    /// The attributes of an inode: `FS_IOC_FSSETXATTR`, `file_setattr(2)` and their counterparts.
    Attributes,
    /// `XFS_IOC_FREE_EOFBLOCKS`.
    Xfs,
}

/// The errno of any call of this area, explained.
pub(crate) fn explain<T>(
    result: sys::Result<T>,
    interface: Interface<'_>,
    operation: &'static str,
    object: impl fmt::Display,
) -> Result<T> {
    result.map_err(|errno| {
        let enforcement = match interface {
            // Where even this is refused, nothing is known against the file system.
            Interface::Quota(fs) => ProjectQuota::of(fs).enforcement().unwrap_or(Enforcement::Enforcing),
            Interface::Attributes | Interface::Xfs => Enforcement::Enforcing,
        };
        let meaning = meaning(errno, interface, enforcement, in_user_namespace());
        let error = Error::sys(operation, object, errno);
        match meaning {
            Some((kind, explanation)) => error.with_kind(kind).explain(explanation),
            None => error,
        }
    })
}

/// False where `/proc` cannot say: then nothing is claimed.
fn in_user_namespace() -> bool {
    std::fs::metadata("/proc/self/ns/user").is_ok_and(|namespace| namespace.ino() != INITIAL_USER_NAMESPACE)
}

type Meaning = Option<(ErrorKind, Explanation)>;

const USER_NAMESPACE: (ErrorKind, Explanation) = (
    ErrorKind::InUserNamespace,
    Explanation::of(
        "the process is in a user namespace, from which no project quota can be read or changed, with any capability",
        "run it in the initial one",
    ),
);

/// Returns what an errno of an interface means on a file system that treats project quotas in this way.
fn meaning(
    errno: Errno,
    interface: Interface<'_>,
    enforcement: Enforcement,
    in_user_namespace: bool,
) -> Meaning {
    use Interface::{Attributes, Quota, Xfs};

    let explained = |kind, cause, remedy| Some((kind, Explanation::of(cause, remedy)));
    match (errno, interface) {
        (Errno::EPERM | Errno::EACCES, _) | (Errno::EINVAL, Quota(_) | Attributes) if in_user_namespace => {
            Some(USER_NAMESPACE)
        }
        (Errno::EPERM | Errno::EACCES, _) => {
            let remedy = match interface {
                Quota(_) => "CAP_SYS_ADMIN is needed to change the quota of a project, and to read it",
                Attributes => "only the owner may change the project id, and who has CAP_FOWNER",
                Xfs => "CAP_SYS_ADMIN is needed",
            };
            Some((ErrorKind::PermissionDenied, Explanation::default().with_remedy(remedy)))
        }
        (Errno::EROFS, _) => explained(
            ErrorKind::ReadOnly,
            "the mount or its file system is read-only",
            "use a writable mount, and look for I/O errors in the kernel log",
        ),
        // A kernel without the call returns ENOSYS, and so do XFS without a quota option and a file system without quotas. Others whose
        // quotas are off return ESRCH and EINVAL.
        (Errno::ENOSYS | Errno::ESRCH | Errno::EINVAL | Errno::EOPNOTSUPP, Quota(_)) => enforcement.problem(),
        (Errno::EBADF, Attributes | Xfs) => explained(
            ErrorKind::InvalidInput,
            "the descriptor is O_PATH or not open",
            "open the file or directory for reading",
        ),
        (Errno::ENOTTY | Errno::EOPNOTSUPP | Errno::ENOSYS, Attributes) => {
            explained(ErrorKind::Unsupported, "the file system or the kernel has no project ids", "use XFS")
        }
        (Errno::ENOTTY | Errno::EOPNOTSUPP, Xfs) => {
            Some((ErrorKind::Unsupported, "the file system is not XFS".into()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::no_syscall(Errno::ENOSYS, Enforcement::NoSyscall, false, ErrorKind::Unsupported, "5.14")]
    #[case::ext4_without_quota(Errno::ESRCH, Enforcement::NoQuota, false, ErrorKind::NotEnforced, "prjquota")]
    #[case::no_such_type(Errno::EINVAL, Enforcement::NoQuota, false, ErrorKind::NotEnforced, "prjquota")]
    #[case::counted(Errno::EINVAL, Enforcement::AccountingOnly, false, ErrorKind::NotEnforced, "pqnoenforce")]
    #[case::unmapped(Errno::EINVAL, Enforcement::Enforcing, true, ErrorKind::InUserNamespace, "initial")]
    fn each_cause_has_its_remedy(
        #[case] errno: Errno,
        #[case] enforcement: Enforcement,
        #[case] in_user_namespace: bool,
        #[case] kind: ErrorKind,
        #[case] remedy: &str,
    ) {
        let root = std::fs::File::open("/").unwrap();
        let interface = Interface::Quota(root.as_fd());
        let (found, explanation) = meaning(errno, interface, enforcement, in_user_namespace).unwrap();
        assert_eq!(found, kind);
        let error = Error::sys("limit project", 7, errno).explain(explanation);
        assert!(error.remedy().is_some_and(|text| text.contains(remedy)), "{error}");
    }

    #[test]
    fn unexplained_errnos_have_no_meaning() {
        let root = std::fs::File::open("/").unwrap();
        let quota = Interface::Quota(root.as_fd());
        assert_eq!(meaning(Errno::EINVAL, quota, Enforcement::Enforcing, false), None);
        assert_eq!(meaning(Errno::EIO, quota, Enforcement::NoQuota, true), None);
        assert_eq!(meaning(Errno::EINVAL, Interface::Attributes, Enforcement::Enforcing, false), None);
        assert_eq!(meaning(Errno::EINVAL, Interface::Xfs, Enforcement::Enforcing, true), None);
    }
}
