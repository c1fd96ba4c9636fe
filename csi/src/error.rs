//! What can go wrong in a call. [`crate::services`] says which gRPC code each is.

use std::path::PathBuf;

use loopfs::{SnapshotId, VolumeId};
use nix::errno::Errno;

use crate::object::Object;

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The request can never succeed.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),

    /// The volume cannot be used in the way that was asked.
    #[error("volume_capability: {0}")]
    WrongAccessType(String),

    #[error("another operation on {0} is in progress; retry when it has finished")]
    OperationPending(Object),

    /// Something that will pass by itself.
    #[error("{0}; retry")]
    Temporary(String),

    /// The node's file system is missing, foreign or not enforcing quotas.
    #[error("this node's volumes cannot be reached: {0}")]
    StorageUnavailable(String),

    /// The driver has started a moment ago.
    #[error("this node's volumes cannot be reached: they are being opened")]
    StorageStarting,

    #[error(transparent)]
    Storage(#[from] loopfs::Error),

    /// Published at the target already, in another way than is asked now.
    #[error("{0}")]
    PublishedDifferently(String),

    /// There is a volume of that name, and it is not what is asked.
    #[error("{0}")]
    Incompatible(String),

    /// Not on this node; elsewhere it may be possible.
    #[error("{0}")]
    NotOnThisNode(String),

    /// A list cannot be continued from there.
    #[error("{0}")]
    StaleToken(String),

    /// The state of the node does not allow it.
    #[error("{0}")]
    Precondition(String),

    #[error("there is no volume {0}")]
    NoSuchVolume(VolumeId),

    #[error("there is no snapshot {0}")]
    NoSuchSnapshot(SnapshotId),

    /// What a new volume shall be filled with, and cannot be.
    #[error("{0}")]
    UnsuitableSource(String),

    /// What a new volume shall be filled with, and is not there.
    #[error("{0}")]
    SourceNotFound(String),

    /// The volume is not where it was said to be.
    #[error("{0}")]
    NotPublished(String),

    #[error("{0}")]
    OutOfRange(String),

    /// A system call on a target path.
    #[error("{operation} {}: {errno}", path.display())]
    Target { operation: &'static str, path: PathBuf, errno: Errno },

    /// A defect of this program.
    #[error("{0}")]
    Defect(String),
}

/// Why a request can never succeed as it is.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub(crate) struct InvalidRequest {
    field: &'static str,
    problem: String,
}

impl InvalidRequest {
    pub(crate) fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self { field, problem: problem.into() }
    }
}
