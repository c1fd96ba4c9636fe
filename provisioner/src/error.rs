//! Errors of a reconcile.

use loopfs::ErrorKind;
use loopfs::volume_store::VolumeId;

use crate::objects::ownership::InvalidHandle;
use crate::objects::refusal::Refusal;
use crate::store::driver::StorageError;

/// The error of a failed reconcile. Its text appears in events, so it is written for the owner of the claim.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The claim or its class requests something that this driver does not support.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The driver returned an error, or does not answer.
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("{operation} {object}: {}", api_message(.source))]
    Api { operation: &'static str, object: String, source: kube::Error },
    #[error(
        "PersistentVolume {0} of this claim is being deleted; the claim is provisioned once that no longer exists; if it \
         stays, remove its finalizers"
    )]
    VolumeDeleting(String),
    #[error(
        "a PersistentVolume named {0} exists and does not belong to this claim; delete it or recreate it under another name"
    )]
    NameTaken(String),
    #[error(
        "PersistentVolume {by} also has the handle of volume {id}, so the data is kept; delete PersistentVolume {by} and its claim, or set \
         persistentVolumeReclaimPolicy of this one to Retain"
    )]
    StillReferenced { id: VolumeId, by: String },
    #[error(
        "the claim's data source, {source_object}, is on node {node:?} and can only be copied there; make the pod run on that node \
         with its nodeSelector"
    )]
    SourceElsewhere { source_object: String, node: String },
    /// The Node object of this machine was deleted, so what the API server does not hold proves nothing about this node's volumes.
    #[error(
        "the Node object {0:?} of this machine does not exist, so no volume is deleted for want of its objects; restart the kubelet, which \
         registers the node again"
    )]
    NodeDeleted(String),
    #[error(
        "another task is creating, copying or deleting volume {0} at this moment; the provisioner retries"
    )]
    InFlight(VolumeId),
    #[error(
        "the copy of the data source into volume {0} ended, because the claim does not wait for it any more"
    )]
    CopyEnded(VolumeId),
    /// The volume handle of a PersistentVolume that a person created.
    #[error(transparent)]
    Handle(#[from] InvalidHandle),
}

/// Returns the text of an error. kube's own text for an error of the API server ends in a debug dump of it.
pub(crate) fn api_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

impl Error {
    /// Returns the error of a failed API request for an object.
    pub(crate) fn api(operation: &'static str, object: impl Into<String>, source: kube::Error) -> Self {
        Error::Api { operation, object: object.into(), source }
    }

    /// Returns the name of this kind of failure, out of a fixed set.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Error::Refused(_) => "Refused",
            Error::Storage(StorageError::Untried | StorageError::Unavailable(_)) => "StorageUnavailable",
            Error::Storage(StorageError::Unanswered(_)) => "DriverUnanswered",
            Error::Storage(StorageError::OtherFilesystem { .. }) => "OtherFilesystem",
            Error::Storage(StorageError::Defect(_)) => "Defect",
            Error::Storage(StorageError::Volume(error)) => match error.kind {
                ErrorKind::NoSpace => "NoSpace",
                ErrorKind::Busy | ErrorKind::Conflict => "Busy",
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
            Error::StillReferenced { .. } => "StillReferenced",
            Error::SourceElsewhere { .. } => "SourceElsewhere",
            Error::InFlight(_) | Error::Storage(StorageError::Pending(_)) => "InFlight",
            Error::CopyEnded(_) => "CopyEnded",
            Error::NodeDeleted(_) => "NodeDeleted",
            Error::Handle(_) => "InvalidHandle",
        }
    }

    /// Returns `true` if the node has too little free space, or no free project id.
    pub(crate) fn is_no_space(&self) -> bool {
        matches!(self, Error::Storage(StorageError::Volume(error)) if error.kind == ErrorKind::NoSpace)
    }

    /// Returns `true` if freed space or a reopened store may let a retry succeed.
    pub(crate) fn awaits_storage(&self) -> bool {
        match self {
            Error::Storage(StorageError::OtherFilesystem { .. }) => true,
            Error::Storage(error) => error.is_reported() || self.is_no_space(),
            _ => false,
        }
    }

    /// Returns `true` if the API object changed in the meantime, or another task or call works on the volume. Nothing is wrong then: the
    /// reconcile decides again shortly, if the object still exists.
    pub(crate) fn is_conflict(&self) -> bool {
        match self {
            // The API server's own reason decides. A proxy that returns the same HTTP status has not read any object.
            Error::Api { source: kube::Error::Api(status), .. } => {
                matches!(status.reason.as_str(), "Conflict" | "NotFound")
            }
            Error::InFlight(_) | Error::CopyEnded(_) | Error::Storage(StorageError::Pending(_)) => true,
            _ => false,
        }
    }
}
