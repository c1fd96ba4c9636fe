//! The error type of the crate. It names the operation, the object, the cause and the remedy.

use std::borrow::Cow;
use std::fmt;

use nix::errno::Errno;

use crate::units::Bytes;

/// A result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an [`Error`], by which a caller decides what to do. Without a more precise cause it follows from the errno of the failed
/// system call, which each kind names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The volume, device or file does not exist (ENOENT): treat it as deleted or detached.
    NotFound,
    /// The object exists with other properties than the requested ones (EEXIST): compare them, or choose another name.
    AlreadyExists,
    /// An argument is invalid (EINVAL, ENAMETOOLONG, ENOTDIR, ELOOP, EXDEV): correct the request. A retry cannot succeed.
    InvalidInput,
    /// The file system has less available space than requested (ENOSPC, EDQUOT, EFBIG): request less, or free space.
    NoSpace,
    /// The requested size is smaller than the current one, and shrinking would lose data: request at least the current size.
    WouldShrink,
    /// Something else is there, or the object is used in a way that excludes this one: end that use, or remove what the message names.
    Conflict,
    /// The object is in use (EBUSY, EAGAIN): try again later, or close it.
    Busy,
    /// Project quotas are not enforced on the file system: mount it with `prjquota`. A remount does not enable quotas.
    NotEnforced,
    /// Nothing is mounted where the data file system should be: mount the data disk, and open the store again.
    NotMounted,
    /// Nothing is mounted where the data file system should be, and no store was ever initialised there: prepare a disk. Most likely the
    /// machine has none for volumes.
    NeverMounted,
    /// Another file system is mounted than the one the store was initialised on: mount that one.
    WrongFilesystem,
    /// The kernel did not grant a requested property: do without it, or use another file system or kernel.
    NotHonoured,
    /// The kernel or the file system lacks the feature (ENOSYS, EOPNOTSUPP, ENOTTY): use another one, or allow the system call in the
    /// seccomp filter.
    Unsupported,
    /// The process lacks a capability or permission (EPERM, EACCES): run it with the capability that the message names.
    PermissionDenied,
    /// The process is in a user namespace, where no capability is sufficient: run it in the initial one.
    InUserNamespace,
    /// The file system is read-only (EROFS): look for I/O errors in the kernel log, and remount it.
    ReadOnly,
    /// The file system has shut down, most likely after an I/O error: look for it in the kernel log, unmount, and mount again.
    ShutDown,
    /// Stored data is lost, or the file system is corrupt (EUCLEAN): repair the file system, and restore the data from a backup.
    Damaged,
    /// Any other error of the kernel; see [`Error::errno`].
    Other,
}

impl ErrorKind {
    fn of(errno: Errno) -> Self {
        match errno {
            Errno::ENOENT => Self::NotFound,
            Errno::EEXIST => Self::AlreadyExists,
            Errno::EINVAL | Errno::ENAMETOOLONG | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV => {
                Self::InvalidInput
            }
            Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG => Self::NoSpace,
            Errno::EBUSY | Errno::EAGAIN => Self::Busy,
            Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::ENOTTY => Self::Unsupported,
            Errno::EPERM | Errno::EACCES => Self::PermissionDenied,
            Errno::EROFS => Self::ReadOnly,
            // XFS calls it EFSCORRUPTED.
            Errno::EUCLEAN => Self::Damaged,
            _ => Self::Other,
        }
    }
}

/// Why an operation failed, and the remedy if there is one, printed as `cause; remedy`. Both are empty if the errno says all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Explanation {
    cause: Cow<'static, str>,
    remedy: Cow<'static, str>,
}

impl Explanation {
    pub(crate) const fn of(cause: &'static str, remedy: &'static str) -> Self {
        Self { cause: Cow::Borrowed(cause), remedy: Cow::Borrowed(remedy) }
    }

    pub(crate) fn with_remedy(self, remedy: impl Into<Cow<'static, str>>) -> Self {
        Self { remedy: remedy.into(), ..self }
    }
}

impl From<&'static str> for Explanation {
    fn from(cause: &'static str) -> Self {
        Self { cause: cause.into(), ..Self::default() }
    }
}

impl From<String> for Explanation {
    fn from(cause: String) -> Self {
        Self { cause: cause.into(), ..Self::default() }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&joined(&self.cause, &self.remedy))
    }
}

fn joined(first: &str, second: &str) -> String {
    let separator = if first.is_empty() || second.is_empty() { "" } else { "; " };
    format!("{first}{separator}{second}")
}

/// The sizes because of which an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sizes {
    /// The requested bytes. For [`ErrorKind::NoSpace`], these are all that the store would reserve: also the space of the inodes of a new
    /// volume, and for an expansion only what it adds.
    pub requested: Bytes,
    /// The limit. For [`ErrorKind::NoSpace`], these are the available bytes, and for [`ErrorKind::WouldShrink`] the current size.
    pub limit: Bytes,
}

/// A failed operation, printed as `operation object: cause; remedy: errno`, without the parts that are unknown.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    operation: &'static str,
    object: String,
    explanation: Explanation,
    errno: Option<Errno>,
    sizes: Option<Sizes>,
}

impl Error {
    pub(crate) fn new(
        kind: ErrorKind,
        operation: &'static str,
        object: impl fmt::Display,
        explanation: impl Into<Explanation>,
    ) -> Self {
        let (object, explanation) = (object.to_string(), explanation.into());
        Self { kind, operation, object, explanation, errno: None, sizes: None }
    }

    pub(crate) fn sys(operation: &'static str, object: impl fmt::Display, errno: Errno) -> Self {
        Self {
            kind: ErrorKind::of(errno),
            operation,
            object: object.to_string(),
            explanation: Explanation::default(),
            errno: Some(errno),
            sizes: None,
        }
    }

    /// Explains the errno, instead of an earlier explanation.
    pub(crate) fn explain(self, explanation: impl Into<Explanation>) -> Self {
        Self { explanation: explanation.into(), ..self }
    }

    /// Adds what the caller or the administrator can do. An empty text is none.
    pub(crate) fn with_remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.explanation.remedy = remedy.into();
        self
    }

    /// Adds a further cause and its remedy. After an earlier remedy, both are part of the remedy.
    #[cfg(feature = "volume-store")]
    pub(crate) fn add(mut self, further: &Explanation) -> Self {
        let Explanation { cause, remedy } = &mut self.explanation;
        if remedy.is_empty() {
            *cause = joined(cause, &further.cause).into();
            *remedy = further.remedy.clone();
        } else {
            *remedy = joined(remedy, &further.to_string()).into();
        }
        self
    }

    pub(crate) fn with_kind(self, kind: ErrorKind) -> Self {
        Self { kind, ..self }
    }

    pub(crate) fn with_sizes(self, requested: Bytes, limit: Bytes) -> Self {
        Self { sizes: Some(Sizes { requested, limit }), ..self }
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the kernel's errno if a system call failed.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.errno.map(|errno| errno as i32)
    }

    /// Returns what the caller or the administrator can do, if the library knows more than [`ErrorKind`] says. It is a part of the
    /// message, and its text is for people.
    #[must_use]
    pub fn remedy(&self) -> Option<&str> {
        Some(&*self.explanation.remedy).filter(|remedy| !remedy.is_empty())
    }

    /// Returns the sizes because of which the operation failed. Only errors of the kinds [`ErrorKind::NoSpace`] and
    /// [`ErrorKind::WouldShrink`] have them, and not all: the kernel returns none, and inodes can be used up too.
    #[must_use]
    pub fn sizes(&self) -> Option<Sizes> {
        self.sizes
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.operation, self.object)?;
        if self.explanation != Explanation::default() {
            write!(f, ": {}", self.explanation)?;
        }
        if let Some(errno) = self.errno {
            write!(f, ": {} ({errno:?})", errno.desc())?;
        }
        Ok(())
    }
}

/// The message contains the cause and its errno, so there is no [`source`](std::error::Error::source) that would repeat them.
impl std::error::Error for Error {}

/// Keeps the whole error: [`std::io::Error::get_ref`] returns it. The kind follows from the errno, and is
/// [`Other`](std::io::ErrorKind::Other) without one.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        let kind =
            error.errno().map_or(std::io::ErrorKind::Other, |errno| Self::from_raw_os_error(errno).kind());
        Self::new(kind, error)
    }
}

/// Adds the operation and the object to the error of a failed system call.
pub(crate) trait Context<T> {
    fn context(self, operation: &'static str, object: impl fmt::Display) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, Errno> {
    fn context(self, operation: &'static str, object: impl fmt::Display) -> Result<T> {
        self.map_err(|errno| Error::sys(operation, object, errno))
    }
}

impl<T> Context<T> for std::io::Result<T> {
    fn context(self, operation: &'static str, object: impl fmt::Display) -> Result<T> {
        self.map_err(|error| match error.raw_os_error() {
            Some(raw) => Error::sys(operation, object, Errno::from_raw(raw)),
            None => Error::new(ErrorKind::Other, operation, object, error.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn an_error_prints_each_part_once() {
        let error =
            Error::sys("open", "/dev/loop-control", Errno::ENOENT).with_remedy("load the loop module");
        assert_eq!(
            error.to_string(),
            "open /dev/loop-control: load the loop module: No such file or directory (ENOENT)"
        );
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(error.errno(), Some(2));
    }

    #[rstest]
    #[case::neither(Explanation::default(), "", None)]
    #[case::cause("it is published".into(), ": it is published", None)]
    #[case::remedy(Explanation::default().with_remedy("unpublish it"), ": unpublish it", Some("unpublish it"))]
    #[case::both(
        Explanation::of("it is published", "unpublish it"),
        ": it is published; unpublish it",
        Some("unpublish it")
    )]
    fn the_remedy_follows_the_cause(
        #[case] explanation: Explanation,
        #[case] printed: &str,
        #[case] remedy: Option<&str>,
    ) {
        let error = Error::new(ErrorKind::Busy, "delete", "pvc-1", explanation.clone());
        assert_eq!((error.to_string(), error.remedy()), (format!("delete pvc-1{printed}"), remedy));
        // Instead of an earlier one.
        let earlier =
            Error::sys("delete", "pvc-1", Errno::EBUSY).explain("it is open").with_remedy("close it");
        let error = earlier.explain(explanation);
        let errno = ": Device or resource busy (EBUSY)";
        assert_eq!((error.to_string(), error.remedy()), (format!("delete pvc-1{printed}{errno}"), remedy));
    }

    #[cfg(feature = "volume-store")]
    #[rstest]
    #[case("2 requested".into(), "2 requested; the trash holds 1", "empty it")]
    #[case(
        Explanation::of("2 requested", "request less"),
        "2 requested",
        "request less; the trash holds 1; empty it"
    )]
    fn an_added_cause_keeps_its_remedy(
        #[case] explanation: Explanation,
        #[case] cause: &str,
        #[case] remedy: &str,
    ) {
        let error = Error::new(ErrorKind::NoSpace, "create", "pvc-1", explanation)
            .add(&Explanation::of("the trash holds 1", "empty it"));
        assert_eq!(error.remedy(), Some(remedy));
        assert_eq!(error.to_string(), format!("create pvc-1: {cause}; {remedy}"));
    }

    /// The `std::io::Error` has the kind of the errno and contains the whole loopfs error.
    #[test]
    fn an_io_error_keeps_the_error() {
        let error = Error::sys("open", "/dev/loop-control", Errno::ENOENT).with_kind(ErrorKind::Unsupported);
        let converted = std::io::Error::from(error.clone());
        assert_eq!(converted.kind(), std::io::ErrorKind::NotFound);
        assert_eq!(converted.to_string(), error.to_string());
        let inner = converted.get_ref().and_then(|inner| inner.downcast_ref::<Error>()).unwrap();
        assert_eq!(inner.kind(), ErrorKind::Unsupported);
        let busy = Error::new(ErrorKind::Busy, "delete", "pvc-1", "it is published");
        assert_eq!(std::io::Error::from(busy).kind(), std::io::ErrorKind::Other);
    }
}
