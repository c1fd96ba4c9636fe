//! The record of the node and the file system that the volumes of this machine belong to.
//!
//! An orphaned volume is removed on the evidence that this node had every occasion to see its PersistentVolume. A node that was deleted
//! and comes back, and a disk that was moved, have volumes whose PersistentVolumes were deleted while they were away. A new Node object
//! has another UID, and a moved disk another file system than the record, so these volumes are known, and clean-up never removes them.
//!
//! The record is beside the data directory and not in it: a disk takes no record along. Without a record, all volumes are kept.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use loopfs::{ErrorKind, volume_store::VolumeId};
use serde::{Deserialize, Serialize};

use super::volumes::VolumeError;

/// The record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Custody {
    /// The UID of the Node object.
    pub(crate) node_uid: String,
    pub(crate) filesystem_uuid: String,
    /// The names of the volumes that were there when this record was made.
    pub(crate) found: BTreeSet<String>,
}

impl Custody {
    /// Returns the path of the record for a data directory, beside that: for `/var/lib/loopfs/data`, it is `/var/lib/loopfs/data.custody`.
    pub(crate) fn path_beside(data_dir: &Path) -> PathBuf {
        let mut name = data_dir.file_name().unwrap_or_default().to_owned();
        name.push(".custody");
        data_dir.with_file_name(name)
    }

    /// Returns the record that follows this one. Pure.
    pub(crate) fn next(
        before: Option<Custody>,
        node_uid: &str,
        filesystem_uuid: &str,
        volumes: &BTreeSet<VolumeId>,
    ) -> Custody {
        let names: BTreeSet<_> = volumes.iter().map(ToString::to_string).collect();
        let found = match before {
            Some(before) if before.node_uid == node_uid && before.filesystem_uuid == filesystem_uuid => {
                &before.found & &names
            }
            _ => names,
        };
        Custody { node_uid: node_uid.to_owned(), filesystem_uuid: filesystem_uuid.to_owned(), found }
    }

    /// Returns `true` if the volume was there before this node and this file system belonged together.
    pub(crate) fn keeps(&self, id: &VolumeId) -> bool {
        self.found.contains(id.as_str())
    }

    /// Reads the record. One that was damaged is as good as none.
    ///
    /// # Errors
    /// When it exists and cannot be read.
    pub(crate) fn read(path: &Path) -> Result<Option<Custody>, VolumeError> {
        match fs::read(path) {
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read", path, &error)),
        }
    }

    /// Replaces the record. When this returns, it survives a power cut.
    ///
    /// # Errors
    /// When it cannot be written or made durable.
    pub(crate) fn write(&self, path: &Path) -> Result<(), VolumeError> {
        let replace = || {
            let new = path.with_extension("custody.new");
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            fs::rename(&new, path)?;
            File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
        };
        replace().map_err(|error| failed("write", path, &error))
    }
}

fn failed(operation: &str, path: &Path, error: &io::Error) -> VolumeError {
    VolumeError { kind: ErrorKind::Other, message: format!("{operation} {}: {error}", path.display()) }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn ids(names: &[&str]) -> BTreeSet<VolumeId> {
        names.iter().map(|name| VolumeId::parse(name).unwrap()).collect()
    }

    fn of(node_uid: &str, filesystem_uuid: &str) -> Custody {
        Custody::next(None, node_uid, filesystem_uuid, &ids(&["pvc-1", "pvc-2"]))
    }

    #[rstest]
    #[case::same(Some(of("n", "f")), &["pvc-1"])]
    #[case::registered_again(Some(of("other", "f")), &["pvc-1", "pvc-3"])]
    #[case::another_disk(Some(of("n", "other")), &["pvc-1", "pvc-3"])]
    #[case::no_record(None, &["pvc-1", "pvc-3"])]
    fn volumes_that_were_there_before_are_kept(#[case] before: Option<Custody>, #[case] kept: &[&str]) {
        let present = ids(&["pvc-1", "pvc-3"]);
        let custody = Custody::next(before, "n", "f", &present);
        let kept_now = present.iter().filter(|id| custody.keeps(id)).map(VolumeId::as_str);
        assert_eq!(kept_now.collect::<Vec<_>>(), kept);
    }

    #[test]
    fn a_record_is_replaced_and_read_back() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("data.custody");
        assert_eq!(Custody::read(&path), Ok(None));
        for custody in [of("n", "f"), of("m", "f")] {
            custody.write(&path).unwrap();
            assert_eq!(Custody::read(&path), Ok(Some(custody)));
        }
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
        fs::write(&path, "{").unwrap();
        assert_eq!(Custody::read(&path), Ok(None));
    }
}
