//! The volume store's interface for the provisioner: the calls of [`loopfs::volume_store::VolumeStore`] that it uses.
//!
//! Tests implement it in order to run the I/O paths on machines without XFS project quotas. The trait adds no
//! behaviour. The store itself is tested in its own crate, on real kernels.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use loopfs::volume_store::{
    ContentSource, ForeignEvidence, ForeignFiles, Space, StoreCounts, VolumeId, VolumeSpec, VolumeStore,
};
use loopfs::{Bytes, ErrorKind};

use crate::store::claim_record::ClaimRecord;

/// A store of volumes. Calls block.
pub(crate) trait VolumeBackend: Send + Sync + 'static {
    /// Returns the UUID of the file system of the volumes, in its usual text form.
    fn filesystem_uuid(&self) -> String;
    /// See [`VolumeStore::verify`].
    fn verify(&self) -> Result<(), VolumeError>;
    /// See [`VolumeStore::recover`].
    fn recover(&self) -> Result<String, VolumeError>;
    /// Returns `true` if the volume exists, is not pending, and [holds data](loopfs::volume_store::Volume::holds_data).
    fn holds_earlier_data(&self, id: &VolumeId) -> Result<bool, VolumeError>;
    /// See [`VolumeStore::create`]; returns the recorded capacity.
    fn create(&self, id: &VolumeId, spec: &VolumeSpec) -> Result<Bytes, VolumeError>;
    /// Copies a volume or snapshot; see [`VolumeStore::clone_from_while`]. Returns the recorded capacity.
    fn clone_from(
        &self,
        source: ContentSource<'_>,
        id: &VolumeId,
        spec: &VolumeSpec,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Bytes, VolumeError>;
    /// Returns the pending volumes of claims; see [`VolumeStore::pending`].
    fn pending(&self) -> Result<BTreeMap<VolumeId, ClaimRecord>, VolumeError>;
    /// See [`VolumeStore::confirm`]. Succeeds if the volume does not exist.
    fn confirm(&self, id: &VolumeId) -> Result<(), VolumeError>;
    /// See [`VolumeStore::expand`]; returns the recorded capacity.
    fn expand(&self, id: &VolumeId, to: Bytes) -> Result<Bytes, VolumeError>;
    /// See [`VolumeStore::wait_for_device_size`].
    fn wait_for_device_size(
        &self,
        id: &VolumeId,
        capacity: Bytes,
        within: Duration,
    ) -> Result<bool, VolumeError>;
    /// See [`VolumeStore::delete`].
    fn delete(&self, id: &VolumeId) -> Result<bool, VolumeError>;
    /// See [`VolumeStore::list`].
    fn list(&self) -> Result<Vec<VolumeId>, VolumeError>;
    /// See [`VolumeStore::space`].
    fn space(&self) -> Result<Space, VolumeError>;
    /// See [`VolumeStore::counts`].
    fn counts(&self) -> Result<StoreCounts, VolumeError>;
    /// See [`VolumeStore::empty_trash_yielding`].
    fn empty_trash(&self, yield_now: &mut dyn FnMut()) -> Result<usize, VolumeError>;
    /// See [`VolumeStore::foreign_evidence`].
    fn foreign_evidence(&self) -> Result<ForeignEvidence, VolumeError>;
    /// See [`VolumeStore::find_foreign_files`].
    fn find_foreign_files(
        &self,
        volumes: Option<&BTreeSet<VolumeId>>,
        yield_now: &mut dyn FnMut(),
    ) -> Result<Vec<ForeignFiles>, VolumeError>;
    /// See [`VolumeStore::repair_project`].
    fn repair_project(&self, id: &VolumeId) -> Result<u64, VolumeError>;
}

/// An error of the store: its kind, and a text that names operation, object and remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct VolumeError {
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
}

impl VolumeError {
    /// Returns `true` if the error concerns the store as a whole: all operations fail until an administrator has repaired it.
    pub(crate) fn concerns_the_store(&self) -> bool {
        matches!(
            self.kind,
            ErrorKind::NotMounted
                | ErrorKind::NeverMounted
                | ErrorKind::NotEnforced
                | ErrorKind::WrongFilesystem
                | ErrorKind::ReadOnly
                | ErrorKind::ShutDown
        )
    }

    /// Returns `true` if a retry can only succeed after a smaller request or after space was freed.
    pub(crate) fn is_infeasible(&self) -> bool {
        matches!(self.kind, ErrorKind::NoSpace | ErrorKind::InvalidInput | ErrorKind::NotFound)
    }
}

/// The error of an operation on volumes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StorageError {
    /// No attempt to open the store has completed since the process started.
    #[error("the storage of this node has not been opened yet; the provisioner retries")]
    Untried,
    /// The store cannot be opened.
    #[error("the storage of this node is not usable now: {0}")]
    Unavailable(String),
    /// The store returned an error.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// A bug: the operation panicked. The store's own recovery cleans up after it.
    #[error("internal error in the volume store, see the provisioner's log")]
    Panicked,
}

impl From<loopfs::Error> for VolumeError {
    fn from(error: loopfs::Error) -> Self {
        VolumeError { kind: error.kind(), message: error.to_string() }
    }
}

impl VolumeBackend for VolumeStore {
    fn filesystem_uuid(&self) -> String {
        VolumeStore::filesystem_uuid(self).to_string()
    }

    fn verify(&self) -> Result<(), VolumeError> {
        Ok(VolumeStore::verify(self)?)
    }

    fn recover(&self) -> Result<String, VolumeError> {
        Ok(format!("{:?}", VolumeStore::recover(self)?))
    }

    fn holds_earlier_data(&self, id: &VolumeId) -> Result<bool, VolumeError> {
        match self.volume(id).and_then(|volume| Ok(!volume.is_pending()? && volume.holds_data()?)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            holds_data => Ok(holds_data?),
        }
    }

    fn create(&self, id: &VolumeId, spec: &VolumeSpec) -> Result<Bytes, VolumeError> {
        Ok(VolumeStore::create(self, id, spec)?.capacity())
    }

    fn clone_from(
        &self,
        source: ContentSource<'_>,
        id: &VolumeId,
        spec: &VolumeSpec,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Bytes, VolumeError> {
        Ok(self.clone_from_while(source, id, spec, is_wanted)?.capacity())
    }

    fn pending(&self) -> Result<BTreeMap<VolumeId, ClaimRecord>, VolumeError> {
        let mut records = BTreeMap::new();
        for (id, annotations) in VolumeStore::pending(self)? {
            match ClaimRecord::of_volume(&id, &annotations) {
                Some(record) => drop(records.insert(id, record)),
                None => tracing::debug!(volume = %id, "a pending volume of another program stays"),
            }
        }
        Ok(records)
    }

    fn confirm(&self, id: &VolumeId) -> Result<(), VolumeError> {
        match VolumeStore::confirm(self, id) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            confirmed => Ok(confirmed?),
        }
    }

    fn expand(&self, id: &VolumeId, to: Bytes) -> Result<Bytes, VolumeError> {
        Ok(VolumeStore::expand(self, id, to)?.capacity())
    }

    fn wait_for_device_size(
        &self,
        id: &VolumeId,
        capacity: Bytes,
        within: Duration,
    ) -> Result<bool, VolumeError> {
        Ok(VolumeStore::wait_for_device_size(self, id, capacity, within)?)
    }

    fn delete(&self, id: &VolumeId) -> Result<bool, VolumeError> {
        Ok(VolumeStore::delete(self, id)?)
    }

    fn list(&self) -> Result<Vec<VolumeId>, VolumeError> {
        Ok(VolumeStore::list(self)?)
    }

    fn space(&self) -> Result<Space, VolumeError> {
        Ok(VolumeStore::space(self)?)
    }

    fn counts(&self) -> Result<StoreCounts, VolumeError> {
        Ok(VolumeStore::counts(self)?)
    }

    fn empty_trash(&self, yield_now: &mut dyn FnMut()) -> Result<usize, VolumeError> {
        Ok(self.empty_trash_yielding(yield_now)?)
    }

    fn foreign_evidence(&self) -> Result<ForeignEvidence, VolumeError> {
        Ok(VolumeStore::foreign_evidence(self)?)
    }

    fn find_foreign_files(
        &self,
        volumes: Option<&BTreeSet<VolumeId>>,
        yield_now: &mut dyn FnMut(),
    ) -> Result<Vec<ForeignFiles>, VolumeError> {
        Ok(VolumeStore::find_foreign_files(self, volumes, yield_now)?)
    }

    fn repair_project(&self, id: &VolumeId) -> Result<u64, VolumeError> {
        Ok(VolumeStore::repair_project(self, id)?)
    }
}

impl fmt::Debug for dyn VolumeBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volumes on {}", self.filesystem_uuid())
    }
}
