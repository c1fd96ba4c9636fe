//! The interface of the driver `loopfs-csi` for the provisioner. Only the driver opens the node's volume store.
//!
//! [`client`](super::client) implements it over the driver's control socket, and tests implement it in memory.

use std::collections::{BTreeMap, BTreeSet};

use csi_wire::volumes::{CapacityResponse, CreateResponse, ExpandResponse, ForeignFiles};
use futures::stream::BoxStream;
use loopfs::volume_store::{Annotations, OwnedContentSource, VolumeId, VolumeKind};
use loopfs::{Bytes, ErrorKind};

use crate::store::claim_record::ClaimRecord;

/// The driver of this node. The driver completes each call that it has received, even if the caller does not wait for the response, except
/// a copy, and a deletion that has not begun. Each call can be repeated.
#[tonic::async_trait]
pub(crate) trait Driver: Send + Sync + 'static {
    /// Returns the states of the node's storage: the present one, and each later one. The stream ends when the connection breaks.
    async fn watch(&self) -> Result<BoxStream<'static, Result<NodeState, StorageError>>, StorageError>;
    /// Creates a pending volume, or returns the existing one. A copy of a data source ends if the future is dropped.
    async fn create(&self, volume: NewVolume) -> Result<CreateResponse, StorageError>;
    /// Expands a volume, if it is on this file system or `None` is given, and refreshes its loop devices.
    async fn expand(
        &self,
        id: &VolumeId,
        to: Bytes,
        filesystem_uuid: Option<&str>,
    ) -> Result<ExpandResponse, StorageError>;
    /// Deletes a volume, if it is on this file system or `None` is given. Returns `false` if it does not exist.
    async fn delete(&self, id: &VolumeId, filesystem_uuid: Option<&str>) -> Result<bool, StorageError>;
    /// Confirms a pending volume. Succeeds if the volume does not exist.
    async fn confirm(&self, id: &VolumeId, filesystem_uuid: &str) -> Result<(), StorageError>;
    /// Returns all volumes, or only those that are pending.
    async fn list(&self, only_pending: bool) -> Result<VolumeList, StorageError>;
    /// Returns the free capacity for volumes with these settings.
    async fn capacity(&self, settings: &BTreeMap<String, String>) -> Result<CapacityResponse, StorageError>;
    /// Makes the record durable that the volumes of the disk belong to this Node, and returns it.
    async fn take_custody(&self, node_uid: &str) -> Result<Custody, StorageError>;
    /// Returns what the latest search found.
    async fn foreign_files(&self) -> Result<Vec<ForeignFiles>, StorageError>;
}

/// The state of the node's storage. Each number increases when its object changes, and starts again when the driver does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeState {
    pub(crate) storage: StorageState,
    /// The free space.
    pub(crate) space: u64,
    /// Space or a project id that became free.
    pub(crate) freed: u64,
    /// The result of [`Driver::foreign_files`].
    pub(crate) foreign_files: u64,
}

/// The state of the storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StorageState {
    /// The driver has not tried to open the store yet, or no state of the driver is known.
    Untried,
    Unavailable(String),
    /// No file system was ever mounted at the data directory. On a node without a disk for volumes that is no error.
    Absent(String),
    Open {
        filesystem_uuid: String,
    },
}

/// The volume to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewVolume {
    pub(crate) id: VolumeId,
    pub(crate) kind: VolumeKind,
    pub(crate) capacity: Bytes,
    pub(crate) settings: BTreeMap<String, String>,
    pub(crate) annotations: Annotations,
    /// The volume or snapshot to copy.
    pub(crate) source: Option<OwnedContentSource>,
}

/// The volumes of the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct VolumeList {
    pub(crate) filesystem_uuid: String,
    pub(crate) volumes: BTreeSet<VolumeId>,
    /// The volumes of claims that may have no PersistentVolume yet.
    pub(crate) pending: BTreeMap<VolumeId, ClaimRecord>,
}

/// The record of the node and the file system that the volumes of this machine belong to. The driver keeps it.
///
/// An orphaned volume is removed on the evidence that this node had every occasion to see its PersistentVolume. A node that was deleted
/// and comes back, and a disk that was moved, have volumes whose PersistentVolumes were deleted while they were away. A new Node object
/// has another UID, and a moved disk another file system than the record, so these volumes are known, and clean-up never removes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Custody {
    pub(crate) filesystem_uuid: String,
    /// The names of the volumes that were there before the node and the file system belonged together.
    pub(crate) found: BTreeSet<String>,
}

impl Custody {
    /// Returns `true` if the volume was there before this node and this file system belonged together.
    pub(crate) fn keeps(&self, id: &VolumeId) -> bool {
        self.found.contains(id.as_str())
    }
}

/// An error of the store: its kind, and a text that names operation, object and remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct VolumeError {
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
}

impl VolumeError {
    /// Returns `true` if a retry can only succeed after a smaller request or after space was freed.
    pub(crate) fn is_infeasible(&self) -> bool {
        matches!(self.kind, ErrorKind::NoSpace | ErrorKind::InvalidInput | ErrorKind::NotFound)
    }
}

/// The error of an operation on volumes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StorageError {
    /// The driver has not reported a state since the process or the driver started.
    #[error("the storage of this node has not been opened yet; the provisioner retries")]
    Untried,
    /// The store cannot be used.
    #[error("{0}")]
    Unavailable(String),
    /// The driver does not respond, or its response is unintelligible.
    #[error("{0}")]
    Unanswered(String),
    /// The store returned an error.
    #[error(transparent)]
    Volume(VolumeError),
    /// Another call works on the volume, or the driver has just started and opens the store.
    #[error("{0}")]
    Pending(String),
    /// The volume is on a disk that this node does not have.
    #[error(
        "the volume is on file system {of_volume}, but this node's storage is file system {of_node}; bring the disk back, or \
         delete the volume's data on the other disk and remove the finalizers of this PersistentVolume by hand"
    )]
    OtherFilesystem { of_volume: String, of_node: String },
    /// A bug of the driver.
    #[error("internal error in the driver loopfs-csi, see the log of the driver: {0}")]
    Defect(String),
}

impl From<VolumeError> for StorageError {
    /// An error that concerns the store as a whole is [`Self::Unavailable`]: all operations fail until an administrator has repaired the
    /// store.
    fn from(error: VolumeError) -> Self {
        match error.kind {
            ErrorKind::NotMounted
            | ErrorKind::NeverMounted
            | ErrorKind::NotEnforced
            | ErrorKind::WrongFilesystem
            | ErrorKind::ReadOnly
            | ErrorKind::ShutDown => StorageError::Unavailable(error.message),
            _ => StorageError::Volume(error),
        }
    }
}

impl From<loopfs::Error> for StorageError {
    fn from(error: loopfs::Error) -> Self {
        VolumeError { kind: error.kind(), message: error.to_string() }.into()
    }
}

impl StorageError {
    /// Returns `true` if the storage cannot be used now. An event on the Node reports it.
    pub(crate) fn is_reported(&self) -> bool {
        matches!(self, StorageError::Untried | StorageError::Unavailable(_) | StorageError::Unanswered(_))
    }
}
