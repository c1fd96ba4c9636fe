//! Why a reconcile failed.

use loopfs::{ErrorKind, VolumeId};

use crate::{
    objects::{ownership::InvalidHandle, refusal::Refusal},
    store::volumes::StorageError,
};

/// A failed reconcile. Its text ends up in events, so it is written for whoever owns the claim.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The claim or its class asks for what this driver does not do.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The volume store failed or refused.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The API server failed or refused.
    #[error("{operation} {object}: {}", api_message(.source))]
    Api { operation: &'static str, object: String, source: kube::Error },
    /// The claim's PersistentVolume of an earlier attempt is marked for deletion.
    #[error(
        "PersistentVolume {0} of this claim is being deleted; the claim is provisioned once it is gone; remove the object's \
         finalizers if it stays"
    )]
    VolumeDeleting(String),
    /// Somebody else's object has the name of ours.
    #[error(
        "a PersistentVolume named {0} exists and is not this claim's; it has to be removed or renamed by hand"
    )]
    NameTaken(String),
    /// The volume is on a disk this node does not have (any more).
    #[error(
        "the volume is on file system {of_volume} and this node's storage is file system {of_node}; bring the disk back, or \
         delete the volume's data where it is and remove the finalizers of this object by hand"
    )]
    OtherFilesystem { of_volume: String, of_node: String },
    /// The volume's data cannot be deleted.
    #[error(
        "PersistentVolume {by} has the handle of volume {id} as well, so the data is kept; delete that object and its claim, or set          persistentVolumeReclaimPolicy of this one to Retain"
    )]
    StillReferenced { id: VolumeId, by: String },
    /// What the claim is to be filled with is on another node.
    #[error(
        "{source_object}, which is to be copied, is on node {node:?}, and only there can it be copied; have the pod run there, by its \
         nodeSelector"
    )]
    SourceElsewhere { source_object: String, node: String },
    /// Another task of this process has it in hand; a matter of milliseconds.
    #[error("volume {0} is being made or removed at this moment")]
    InFlight(VolumeId),
    /// The volume handle of a hand-made object.
    #[error(transparent)]
    Handle(#[from] InvalidHandle),
}

/// kube's own text for an error of the API server ends in a debug dump of it.
pub(crate) fn api_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

impl Error {
    /// A failed API call on an object.
    pub(crate) fn api(operation: &'static str, object: impl Into<String>, source: kube::Error) -> Self {
        Error::Api { operation, object: object.into(), source }
    }

    /// One of a fixed set of names for this kind of failure.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Error::Refused(_) => "Refused",
            Error::Storage(StorageError::Unavailable(_)) => "StorageUnavailable",
            Error::Storage(StorageError::Panicked) => "Panicked",
            Error::Storage(StorageError::Volume(error)) => match error.kind {
                ErrorKind::NoSpace => "NoSpace",
                ErrorKind::Busy => "Busy",
                ErrorKind::NotFound => "NotFound",
                ErrorKind::AlreadyExists => "AlreadyExists",
                ErrorKind::InvalidInput => "InvalidInput",
                ErrorKind::PermissionDenied => "PermissionDenied",
                _ => "VolumeStore",
            },
            Error::Api { .. } if self.is_conflict() => "Conflict",
            Error::Api { .. } => "ApiServer",
            Error::VolumeDeleting(_) => "VolumeDeleting",
            Error::NameTaken(_) => "NameTaken",
            Error::OtherFilesystem { .. } => "OtherFilesystem",
            Error::StillReferenced { .. } => "StillReferenced",
            Error::SourceElsewhere { .. } => "SourceElsewhere",
            Error::InFlight(_) => "InFlight",
            Error::Handle(_) => "InvalidHandle",
        }
    }

    /// Whether the object had moved on or is in other hands: nothing is wrong, the decision is to be made
    /// again shortly.
    pub(crate) fn is_conflict(&self) -> bool {
        match self {
            // By the API server's own reason: a proxy that returns the same HTTP status has seen no object.
            Error::Api { source: kube::Error::Api(status), .. } => {
                matches!(status.reason.as_str(), "Conflict" | "NotFound")
            }
            Error::InFlight(_) => true,
            _ => false,
        }
    }
}
