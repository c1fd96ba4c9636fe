//! The errors of calls. `services/rpc.rs` maps each of them to a gRPC code.

use std::path::PathBuf;

use loopfs::FilesystemUuid;
use loopfs::volume_store::{SnapshotId, VolumeId};
use nix::errno::Errno;
use tokio::task::JoinError;

use crate::locks::OperationObject;

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The request can never succeed.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),

    /// The volume does not support the requested access type.
    #[error("volume_capability: {0}")]
    WrongAccessType(String),

    #[error("another operation on {0} is in progress; retry when it has finished")]
    OperationPending(OperationObject),

    /// A condition that ends without intervention.
    #[error("{0}; retry")]
    Temporary(String),

    /// The node's file system is missing, is not the recorded one, or does not enforce quotas.
    #[error("this node's storage is unavailable: {0}")]
    StorageUnavailable(String),

    /// The driver has just started and has not opened the storage yet.
    #[error("this node's storage is being opened; retry")]
    StorageStarting,

    #[error(transparent)]
    Storage(#[from] loopfs::Error),

    /// A volume or snapshot of this name exists and differs from the request.
    #[error("{0}")]
    Incompatible(String),

    /// The request cannot be fulfilled on this node, but possibly on another one.
    #[error("{0}")]
    NotOnThisNode(String),

    /// A list cannot be continued from this token.
    #[error("{0}")]
    StaleToken(String),

    /// The state of the node does not permit the operation.
    #[error("{0}")]
    Precondition(String),

    /// The volume is on a disk that this node does not have.
    #[error(
        "the volume is on file system {of_volume}, but this node's volumes are on {present}; reattach the disk on which the volume was \
         created"
    )]
    OtherFilesystem { of_volume: FilesystemUuid, present: FilesystemUuid },

    #[error("there is no volume {0}")]
    NoSuchVolume(VolumeId),

    #[error("there is no snapshot {0}")]
    NoSuchSnapshot(SnapshotId),

    /// The content source of a new volume cannot be used.
    #[error("{0}")]
    UnsuitableSource(String),

    /// The content source of a new volume does not exist.
    #[error("{0}")]
    SourceNotFound(String),

    /// The volume is not published at the path of the request.
    #[error("{0}")]
    NotPublished(String),

    #[error("{0}")]
    OutOfRange(String),

    /// A system call on a file failed.
    #[error("{operation} {}: {errno}", path.display())]
    File { operation: &'static str, path: PathBuf, errno: Errno },

    /// A defect of this program.
    #[error("{0}")]
    Defect(String),
}

impl From<OperationObject> for Error {
    fn from(locked: OperationObject) -> Self {
        Self::OperationPending(locked)
    }
}

/// A task that panicked. The driver never cancels the tasks for which it waits.
impl From<JoinError> for Error {
    fn from(panic: JoinError) -> Self {
        Self::Defect(format!("a defect of the driver: {panic}"))
    }
}

/// The reason why a request can never succeed.
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
