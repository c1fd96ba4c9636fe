//! The record of the node and the file system that the volumes of this machine belong to. The driver keeps it.
//!
//! An orphaned volume is removed on the evidence that this node had every occasion to see its PersistentVolume. A node that was deleted
//! and comes back, and a disk that was moved, have volumes whose PersistentVolumes were deleted while they were away. A new Node object
//! has another UID, and a moved disk another file system than the record, so these volumes are known, and clean-up never removes them.

use std::collections::BTreeSet;

use loopfs::volume_store::VolumeId;

/// The record of the present Node and file system.
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
