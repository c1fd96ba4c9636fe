//! Records of volumes that are being provisioned, written before the volumes exist.
//!
//! Between the creation of a volume and that of its PersistentVolume only this process knows that they belong together. The record
//! outlives the process. If a record names a volume and no PersistentVolume does, a crash left it behind, or the claim was deleted
//! in the meantime, and the volume is safe to remove. A volume without a record is never removed here: a user may have deleted its
//! PersistentVolume, or the store may belong to another cluster. A volume that held data before it was to be created therefore gets no
//! record.
//!
//! A record is the target of a symbolic link. It exists completely or not at all, and an fsync of the directory makes it durable.
//!
//! The records are beside the data directory and not in it. Losing one of the two is harmless: a record without a volume has no
//! effect, and a volume without a record is kept.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{ResourceExt, runtime::reflector::ObjectRef};
use loopfs::ErrorKind;
use loopfs::volume_store::VolumeId;
use serde::{Deserialize, Serialize};

use crate::store::volumes::VolumeError;

/// The directory of records.
#[derive(Debug, Clone)]
pub(crate) struct Intents {
    directory: PathBuf,
}

/// The claim for which a volume is created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Intent {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

impl Intent {
    pub(crate) fn of(claim: &PersistentVolumeClaim) -> Self {
        Intent {
            namespace: claim.namespace().unwrap_or_default(),
            name: claim.name_any(),
            uid: claim.uid().unwrap_or_default(),
        }
    }

    /// Returns the key of the claim in the cache. The caller must compare the UID as well.
    pub(crate) fn claim(&self) -> ObjectRef<PersistentVolumeClaim> {
        ObjectRef::new(&self.name).within(&self.namespace)
    }
}

/// A failure to read or write a record.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {}", .path.display())]
pub(crate) struct IntentError {
    operation: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl From<IntentError> for VolumeError {
    fn from(error: IntentError) -> Self {
        VolumeError { kind: ErrorKind::Other, message: format!("{error}: {}", error.source) }
    }
}

impl IntentError {
    fn at(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| IntentError { operation, path, source }
    }
}

impl Intents {
    /// Returns the records of a data directory. The records of `/var/lib/loopfs/data` are in
    /// `/var/lib/loopfs/data.provisioning`.
    pub(crate) fn beside(data_dir: &Path) -> Self {
        let mut name = data_dir.file_name().unwrap_or_default().to_owned();
        name.push(".provisioning");
        Intents { directory: data_dir.with_file_name(name) }
    }

    /// Returns the path of the [record of custody](super::custody::Custody), beside the same data directory.
    pub(crate) fn custody(&self) -> PathBuf {
        self.directory.with_extension("custody")
    }

    /// Writes a record. When this returns, the record survives a power cut.
    ///
    /// # Errors
    /// When the record could not be written or made durable.
    pub(crate) fn record(&self, id: &VolumeId, intent: &Intent) -> Result<(), IntentError> {
        if let Err(error) = fs::create_dir(&self.directory)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(IntentError::at("create the directory", &self.directory)(error));
        }
        let path = self.path(id);
        let text = serde_json::to_string(intent)
            .map_err(io::Error::other)
            .map_err(IntentError::at("write", &path))?;
        match symlink(text, &path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(IntentError::at("write", &path)(error))
            }
            // The process that wrote an existing record may have died before the record was durable.
            _ => File::open(&self.directory)
                .and_then(|directory| directory.sync_all())
                .map_err(IntentError::at("fsync", &self.directory)),
        }
    }

    /// Returns `true` if a record of the volume exists.
    ///
    /// # Errors
    /// When that cannot be read.
    pub(crate) fn contains(&self, id: &VolumeId) -> Result<bool, IntentError> {
        let path = self.path(id);
        match fs::symlink_metadata(&path) {
            Ok(_record) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(IntentError::at("read", &path)(error)),
        }
    }

    /// Removes a record. If the machine loses power before the removal is durable, the record exists again, and the cleanup of
    /// orphaned volumes removes it.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub(crate) fn clear(&self, id: &VolumeId) -> Result<(), IntentError> {
        let path = self.path(id);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(IntentError::at("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }

    /// Returns all records. Other files are skipped and stay.
    ///
    /// # Errors
    /// When the directory cannot be read. A missing directory has no records.
    pub(crate) fn list(&self) -> Result<BTreeMap<VolumeId, Intent>, IntentError> {
        let failed = || IntentError::at("read", &self.directory);
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(failed()(error)),
        };
        let mut intents = BTreeMap::new();
        for entry in entries {
            let path = entry.map_err(failed())?.path();
            let id = path.file_name().and_then(|name| VolumeId::parse(name.to_str()?).ok());
            let text = fs::read_link(&path).ok();
            let intent = text.and_then(|text| serde_json::from_slice(text.as_os_str().as_bytes()).ok());
            match (id, intent) {
                (Some(id), Some(intent)) => drop(intents.insert(id, intent)),
                _ => {
                    tracing::warn!(path = %path.display(), "skipped a file that is not a record of provisioning")
                }
            }
        }
        Ok(intents)
    }

    fn path(&self, id: &VolumeId) -> PathBuf {
        // A volume id is a single path component by construction.
        self.directory.join(id.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intent() -> Intent {
        Intent { namespace: "shop".to_owned(), name: "data".to_owned(), uid: "u".to_owned() }
    }

    #[test]
    fn records_are_beside_the_data_directory() {
        assert_eq!(
            Intents::beside(Path::new("/var/lib/loopfs/data")).directory,
            Path::new("/var/lib/loopfs/data.provisioning")
        );
    }

    #[test]
    fn a_record_exists_until_it_is_cleared() {
        let scratch = tempfile::tempdir().unwrap();
        let intents = Intents::beside(&scratch.path().join("data"));
        let id = VolumeId::parse("pvc-u").unwrap();
        assert!(intents.list().unwrap().is_empty());
        assert!(!intents.contains(&id).unwrap());
        intents.record(&id, &intent()).unwrap();
        intents.record(&id, &intent()).unwrap();
        assert!(intents.contains(&id).unwrap());
        assert_eq!(intents.list().unwrap(), BTreeMap::from([(id.clone(), intent())]));
        intents.clear(&id).unwrap();
        intents.clear(&id).unwrap();
        assert!(intents.list().unwrap().is_empty());
    }

    #[test]
    fn files_that_are_not_records_are_skipped() {
        let scratch = tempfile::tempdir().unwrap();
        let intents = Intents::beside(&scratch.path().join("data"));
        fs::create_dir(&intents.directory).unwrap();
        fs::write(intents.directory.join("pvc-file"), "{}").unwrap();
        symlink("{", intents.directory.join("pvc-garbled")).unwrap();
        assert!(intents.list().unwrap().is_empty());
        assert_eq!(fs::read_dir(&intents.directory).unwrap().count(), 2);
    }
}
