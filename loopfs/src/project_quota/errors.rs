//! Why the kernel refused: the same errno has several causes here, and each has a remedy of its own.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;

use nix::errno::Errno;

use super::enforcement::Enforcement;
use crate::error::{Error, ErrorKind, Explanation, Result};
use crate::sys;

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
        let in_user_namespace = in_user_namespace();
        let meaning = match interface {
            Interface::Quota(fs) => {
                // Where even this is refused, nothing is known against the file system.
                let enforcement = Enforcement::of(fs).unwrap_or(Enforcement::Enforcing);
                quota(errno, enforcement, in_user_namespace)
            }
            Interface::Attributes => attributes(errno, in_user_namespace),
            Interface::Xfs => xfs(errno, in_user_namespace),
        };
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

const READ_ONLY: (ErrorKind, Explanation) = (
    ErrorKind::ReadOnly,
    Explanation::of(
        "the mount or its file system is read-only",
        "use a writable mount, and look for I/O errors in the kernel log",
    ),
);

const USER_NAMESPACE: (ErrorKind, Explanation) = (
    ErrorKind::InUserNamespace,
    Explanation::of(
        "the process is in a user namespace, from which no project quota can be read or changed, with any capability",
        "run it in the initial one",
    ),
);

/// The errno is the cause.
fn denied(remedy: &'static str) -> Meaning {
    Some((ErrorKind::PermissionDenied, Explanation::default().with_remedy(remedy)))
}

fn not_open(remedy: &'static str) -> Meaning {
    Some((ErrorKind::InvalidInput, Explanation::of("the descriptor is O_PATH or not open", remedy)))
}

fn quota(errno: Errno, enforcement: Enforcement, in_user_namespace: bool) -> Meaning {
    match errno {
        Errno::EPERM | Errno::EACCES | Errno::EINVAL if in_user_namespace => Some(USER_NAMESPACE),
        Errno::EPERM | Errno::EACCES => {
            denied("CAP_SYS_ADMIN is needed to change the quota of a project, and to read it")
        }
        // ENOSYS is said by a kernel without the call, by XFS without a quota option, and by a file system
        // that knows no quotas; ESRCH and EINVAL by others whose quotas are off.
        Errno::ENOSYS | Errno::ESRCH | Errno::EINVAL | Errno::EOPNOTSUPP => enforcement.problem(),
        Errno::EROFS => Some(READ_ONLY),
        _ => None,
    }
}

fn attributes(errno: Errno, in_user_namespace: bool) -> Meaning {
    match errno {
        Errno::EPERM | Errno::EACCES | Errno::EINVAL if in_user_namespace => Some(USER_NAMESPACE),
        Errno::EPERM | Errno::EACCES => {
            denied("only the owner may change the project id, and who has CAP_FOWNER")
        }
        Errno::EBADF => not_open("open the file or directory for reading"),
        Errno::ENOTTY | Errno::EOPNOTSUPP | Errno::ENOSYS => Some((
            ErrorKind::Unsupported,
            Explanation::of("the file system or the kernel has no project ids", "use XFS"),
        )),
        Errno::EROFS => Some(READ_ONLY),
        _ => None,
    }
}

fn xfs(errno: Errno, in_user_namespace: bool) -> Meaning {
    match errno {
        Errno::EPERM | Errno::EACCES if in_user_namespace => Some(USER_NAMESPACE),
        Errno::EPERM | Errno::EACCES => denied("CAP_SYS_ADMIN is needed"),
        Errno::EBADF => not_open("open a file or directory of the file system for reading"),
        Errno::ENOTTY | Errno::EOPNOTSUPP => {
            Some((ErrorKind::Unsupported, "the file system is not XFS".into()))
        }
        Errno::EROFS => Some(READ_ONLY),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::no_syscall(Errno::ENOSYS, Enforcement::NoSyscall, false, ErrorKind::Unsupported, "5.14")]
    #[case::xfs_without_quota(Errno::ENOSYS, Enforcement::NoQuota, false, ErrorKind::NotEnforced, "prjquota")]
    #[case::ext4_without_quota(Errno::ESRCH, Enforcement::NoQuota, false, ErrorKind::NotEnforced, "prjquota")]
    #[case::no_such_type(Errno::EINVAL, Enforcement::NoQuota, false, ErrorKind::NotEnforced, "prjquota")]
    #[case::counted(Errno::EINVAL, Enforcement::AccountingOnly, false, ErrorKind::NotEnforced, "pqnoenforce")]
    #[case::not_permitted(
        Errno::EPERM,
        Enforcement::Enforcing,
        false,
        ErrorKind::PermissionDenied,
        "CAP_SYS_ADMIN"
    )]
    #[case::user_namespace(Errno::EPERM, Enforcement::Enforcing, true, ErrorKind::InUserNamespace, "initial")]
    #[case::unmapped(Errno::EINVAL, Enforcement::Enforcing, true, ErrorKind::InUserNamespace, "initial")]
    #[case::read_only(Errno::EROFS, Enforcement::Enforcing, false, ErrorKind::ReadOnly, "writable")]
    fn each_cause_has_its_remedy(
        #[case] errno: Errno,
        #[case] enforcement: Enforcement,
        #[case] in_user_namespace: bool,
        #[case] kind: ErrorKind,
        #[case] remedy: &str,
    ) {
        let (found, explanation) = quota(errno, enforcement, in_user_namespace).unwrap();
        assert_eq!(found, kind);
        let error = Error::sys("limit project", 7, errno).explain(explanation);
        assert!(error.remedy().is_some_and(|text| text.contains(remedy)), "{error}");
    }

    #[test]
    fn what_is_not_known_is_left_to_the_errno() {
        assert_eq!(quota(Errno::EINVAL, Enforcement::Enforcing, false), None);
        assert_eq!(quota(Errno::EIO, Enforcement::NoQuota, true), None);
        assert_eq!(attributes(Errno::EINVAL, false), None);
        assert_eq!(xfs(Errno::EINVAL, true), None);
    }
}
