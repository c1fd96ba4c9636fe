//! The record of the node and the file system that the volumes of this machine belong to.
//!
//! An orphaned volume is removed on the evidence that this node had every occasion to see its PersistentVolume. A node that was deleted
//! and comes back, and a disk that was moved, have volumes whose PersistentVolumes were deleted while they were away. A new Node object
//! has another UID, and a moved disk another file system than the record, so these volumes are known, and clean-up never removes them.
//!
//! The record is beside the data directory and not in it: a disk takes no record along. Without a record, all volumes are kept.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use loopfs::volume_store::{VolumeId, VolumeStore};
use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Custody {
    /// The UID of the Node object.
    pub(crate) node_uid: String,
    pub(crate) filesystem_uuid: String,
    /// The names of the volumes that were there when this record was made.
    pub(crate) found: BTreeSet<String>,
}

/// Returns the path of the record beside a data directory: for `/var/lib/loopfs/data`, it is `/var/lib/loopfs/data.custody`.
pub(crate) fn path_beside(data_dir: &Path) -> PathBuf {
    let mut name = data_dir.file_name().unwrap_or_default().to_owned();
    name.push(".custody");
    data_dir.with_file_name(name)
}

/// Returns the record of this node and the file system of the store, after it was made durable. The caller excludes concurrent calls.
///
/// # Errors
/// When the volumes cannot be listed, or the record cannot be read or written.
pub(crate) fn take(path: &Path, node_uid: &str, store: &VolumeStore) -> Result<Custody> {
    let present: BTreeSet<_> = store.list()?.into_iter().collect();
    let before = Custody::read(path)?;
    let next = Custody::next(before.clone(), node_uid, &store.filesystem_uuid().to_string(), &present);
    if before.as_ref() != Some(&next) {
        next.write(path)?;
    }
    Ok(next)
}

impl Custody {
    /// Returns the record that follows this one. Pure.
    fn next(
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

    /// Reads the record. One that was damaged is as good as none.
    ///
    /// # Errors
    /// When it exists and cannot be read.
    fn read(path: &Path) -> Result<Option<Custody>> {
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
    fn write(&self, path: &Path) -> Result<()> {
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

fn failed(operation: &'static str, path: &Path, error: &io::Error) -> Error {
    let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
    Error::File { operation, path: path.to_owned(), errno }
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

    /// If node and disk are unchanged, the earlier list is kept without deleted volumes.
    #[rstest]
    #[case::same(Some(of("n", "f")), &["pvc-1"])]
    #[case::registered_again(Some(of("other", "f")), &["pvc-1", "pvc-3"])]
    #[case::another_disk(Some(of("n", "other")), &["pvc-1", "pvc-3"])]
    #[case::no_record(None, &["pvc-1", "pvc-3"])]
    fn changed_custody_lists_all_present_volumes(#[case] before: Option<Custody>, #[case] kept: &[&str]) {
        let present = ids(&["pvc-1", "pvc-3"]);
        let custody = Custody::next(before, "n", "f", &present);
        assert_eq!(custody.found.iter().map(String::as_str).collect::<Vec<_>>(), kept);
    }

    /// An unreadable record counts as absent.
    #[test]
    fn replaced_record_is_read_back() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("data.custody");
        assert_eq!(Custody::read(&path).unwrap(), None);
        for custody in [of("n", "f"), of("m", "f")] {
            custody.write(&path).unwrap();
            assert_eq!(Custody::read(&path).unwrap(), Some(custody));
        }
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
        fs::write(&path, "{").unwrap();
        assert_eq!(Custody::read(&path).unwrap(), None);
    }
}
