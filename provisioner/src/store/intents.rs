//! Volumes that are being provisioned, written down before they exist.
//!
//! Between a volume and its `PersistentVolume` there is a moment in which only this process knows that they
//! belong together. The record outlives the process: what it names and no `PersistentVolume` does was left
//! behind by a crash or by a claim that was deleted meanwhile, and is safe to remove. A volume without a
//! record is never touched, for it may be one whose object somebody deleted, or the whole of another
//! cluster's.
//!
//! A record is the target of a symbolic link, which is there whole or not at all, and durable with its
//! directory.
//!
//! The records lie beside the data directory and not on it. If one of the two is lost, that is harmless: a
//! record without a volume means nothing, and a volume without a record is kept.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{ResourceExt, runtime::reflector::ObjectRef};
use loopfs::{ErrorKind, VolumeId};
use serde::{Deserialize, Serialize};

use crate::store::volumes::VolumeError;

/// The directory of records.
#[derive(Debug, Clone)]
pub(crate) struct Intents {
    directory: PathBuf,
}

/// The claim a volume is made for.
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

    /// The claim, to look it up by; compare the UID as well.
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
    /// The records that belong to a data directory: `/var/lib/loopfs/data` has its in
    /// `/var/lib/loopfs/data.provisioning`.
    pub(crate) fn beside(data_dir: &Path) -> Self {
        let mut name = data_dir.file_name().unwrap_or_default().to_owned();
        name.push(".provisioning");
        Intents { directory: data_dir.with_file_name(name) }
    }

    /// Writes a record down; when this returns it survives a power cut.
    ///
    /// # Errors
    /// When it does not.
    pub(crate) fn record(&self, id: &VolumeId, intent: &Intent) -> Result<(), IntentError> {
        if let Err(error) = fs::create_dir(&self.directory)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(IntentError::at("make the directory", &self.directory)(error));
        }
        let path = self.path(id);
        let text = serde_json::to_string(intent)
            .map_err(io::Error::other)
            .map_err(IntentError::at("write", &path))?;
        match symlink(text, &path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(IntentError::at("write", &path)(error))
            }
            // Whoever wrote it may have died before it was durable.
            _ => File::open(&self.directory)
                .and_then(|directory| directory.sync_all())
                .map_err(IntentError::at("fsync", &self.directory)),
        }
    }

    /// Takes a record away. If the machine dies before that is on disk, the record is there again, and found
    /// to be done.
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

    /// All records. Files that are none are passed over: whoever put them there may have them.
    ///
    /// # Errors
    /// When the directory cannot be read; one that does not exist holds nothing.
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
                _ => tracing::warn!(path = %path.display(), "not a record of provisioning; left alone"),
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
    fn records_lie_beside_the_data_directory() {
        assert_eq!(
            Intents::beside(Path::new("/var/lib/loopfs/data")).directory,
            Path::new("/var/lib/loopfs/data.provisioning")
        );
    }

    #[test]
    fn a_record_is_there_until_it_is_cleared() {
        let scratch = tempfile::tempdir().unwrap();
        let intents = Intents::beside(&scratch.path().join("data"));
        let id = VolumeId::parse("pvc-u").unwrap();
        assert!(intents.list().unwrap().is_empty());
        intents.record(&id, &intent()).unwrap();
        intents.record(&id, &intent()).unwrap();
        assert_eq!(intents.list().unwrap(), BTreeMap::from([(id.clone(), intent())]));
        intents.clear(&id).unwrap();
        intents.clear(&id).unwrap();
        assert!(intents.list().unwrap().is_empty());
    }

    #[test]
    fn what_is_not_a_record_is_left_alone() {
        let scratch = tempfile::tempdir().unwrap();
        let intents = Intents::beside(&scratch.path().join("data"));
        fs::create_dir(&intents.directory).unwrap();
        fs::write(intents.directory.join("pvc-file"), "{}").unwrap();
        symlink("{", intents.directory.join("pvc-garbled")).unwrap();
        assert!(intents.list().unwrap().is_empty());
        assert_eq!(fs::read_dir(&intents.directory).unwrap().count(), 2);
    }
}
