//! The error type of the crate. It names the operation, the object, the cause and the remedy.

use std::fmt;

use nix::errno::Errno;

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

/// A failed operation, printed as `operation object: cause`.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    operation: &'static str,
    object: String,
    detail: String,
    errno: Option<Errno>,
}

impl Error {
    pub(crate) fn new(
        kind: ErrorKind,
        operation: &'static str,
        object: impl fmt::Display,
        detail: impl fmt::Display,
    ) -> Self {
        Self { kind, operation, object: object.to_string(), detail: detail.to_string(), errno: None }
    }

    pub(crate) fn sys(operation: &'static str, object: impl fmt::Display, errno: Errno) -> Self {
        Self {
            kind: ErrorKind::of(errno),
            operation,
            object: object.to_string(),
            detail: String::new(),
            errno: Some(errno),
        }
    }

    /// Adds a detail to the errno, above all the remedy.
    pub(crate) fn explain(mut self, detail: impl fmt::Display) -> Self {
        self.detail = detail.to_string();
        self
    }

    /// Adds a further sentence to the detail.
    #[cfg(feature = "volume-store")]
    pub(crate) fn add(mut self, detail: impl fmt::Display) -> Self {
        let separator = if self.detail.is_empty() { "" } else { "; " };
        self.detail = format!("{}{separator}{detail}", self.detail);
        self
    }

    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.kind = kind;
        self
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the operation that failed, for instance `open` or `LOOP_CONFIGURE`.
    #[must_use]
    pub fn operation(&self) -> &str {
        self.operation
    }

    /// Returns the object of the operation, for instance a path or a project id.
    #[must_use]
    pub fn object(&self) -> &str {
        &self.object
    }

    /// Returns the kernel's errno if a system call failed.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.errno.map(|errno| errno as i32)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.operation, self.object)?;
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        if let Some(errno) = self.errno {
            write!(f, ": {} ({errno:?})", errno.desc())?;
        }
        Ok(())
    }
}

/// The message contains the cause and its errno, so there is no [`source`](std::error::Error::source) that would repeat them.
impl std::error::Error for Error {}

/// Keeps the whole error: [`std::io::Error::get_ref`] returns it, and the kind follows from the errno if there is one.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        use std::io::ErrorKind as Io;

        let kind = match (error.errno(), error.kind) {
            (Some(errno), _) => Self::from_raw_os_error(errno).kind(),
            (None, ErrorKind::NotFound | ErrorKind::NotMounted | ErrorKind::NeverMounted) => Io::NotFound,
            (None, ErrorKind::AlreadyExists) => Io::AlreadyExists,
            (None, ErrorKind::InvalidInput | ErrorKind::WouldShrink) => Io::InvalidInput,
            (None, ErrorKind::NoSpace) => Io::StorageFull,
            (None, ErrorKind::Busy) => Io::ResourceBusy,
            (None, ErrorKind::NotEnforced | ErrorKind::Unsupported) => Io::Unsupported,
            (None, ErrorKind::PermissionDenied | ErrorKind::InUserNamespace) => Io::PermissionDenied,
            (None, ErrorKind::ReadOnly) => Io::ReadOnlyFilesystem,
            (None, ErrorKind::Damaged) => Io::InvalidData,
            (
                None,
                ErrorKind::Conflict
                | ErrorKind::WrongFilesystem
                | ErrorKind::NotHonoured
                | ErrorKind::ShutDown
                | ErrorKind::Other,
            ) => Io::Other,
        };
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
            None => Error::new(ErrorKind::Other, operation, object, error),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_prints_operation_object_remedy_and_errno_once() {
        let error = Error::sys("open", "/dev/loop-control", Errno::ENOENT).explain("load the loop module");
        assert_eq!(
            error.to_string(),
            "open /dev/loop-control: load the loop module: No such file or directory (ENOENT)"
        );
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(error.errno(), Some(2));
    }

    #[test]
    fn an_io_error_has_the_kind_of_the_errno_and_holds_the_whole_error() {
        let error = Error::sys("open", "/dev/loop-control", Errno::ENOENT).with_kind(ErrorKind::Unsupported);
        let converted = std::io::Error::from(error.clone());
        assert_eq!(converted.kind(), std::io::ErrorKind::NotFound);
        assert_eq!(converted.to_string(), error.to_string());
        let inner = converted.get_ref().and_then(|inner| inner.downcast_ref::<Error>()).unwrap();
        assert_eq!((inner.operation(), inner.object()), ("open", "/dev/loop-control"));
        let busy = Error::new(ErrorKind::Busy, "delete", "pvc-1", "it is published");
        assert_eq!(std::io::Error::from(busy).kind(), std::io::ErrorKind::ResourceBusy);
    }
}
