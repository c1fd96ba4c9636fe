//! The operations of the processes, and what they return.

use std::fmt;

use loopfs::Bytes;
use loopfs::volume_store::{Provisioning, VolumeKind, VolumeSpec};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use crate::environment::MIB;
use crate::failure::Failure;

/// Few, so that processes use the same volumes.
pub(super) const VOLUMES: u8 = 3;
pub(super) const SNAPSHOTS: u8 = 2;
/// A capacity of which the file system holds only a few.
pub(super) const LARGE: u64 = 280 * MIB;
/// More than the file system has.
pub(super) const TOO_LARGE: u64 = 4096 * MIB;

/// What a volume or snapshot is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) enum Form {
    Directory,
    ThickImage,
    ThinImage,
}

impl Form {
    pub(super) fn kind(self) -> VolumeKind {
        match self {
            Self::Directory => VolumeKind::Filesystem,
            Self::ThickImage | Self::ThinImage => VolumeKind::Block,
        }
    }

    pub(super) fn spec(self, capacity: u64) -> VolumeSpec {
        let mut spec = VolumeSpec::new(self.kind(), Bytes(capacity));
        if self == Self::ThinImage {
            spec.image.provisioning = Provisioning::Thin;
        }
        spec
    }
}

/// A volume or a snapshot, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) enum Entry {
    Volume(u8),
    Snapshot(u8),
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(number) => write!(f, "v{number}"),
            Self::Snapshot(number) => write!(f, "s{number}"),
        }
    }
}

/// One operation of a process. Capacities are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Operation {
    Create {
        volume: u8,
        form: Form,
        capacity: u64,
    },
    Clone {
        source: Entry,
        volume: u8,
        form: Form,
        capacity: u64,
    },
    Snapshot {
        source: u8,
        snapshot: u8,
    },
    Expand {
        volume: u8,
        capacity: u64,
    },
    Delete {
        volume: u8,
    },
    DeleteSnapshot {
        snapshot: u8,
    },
    EmptyTrash,
    Recover,
    CountSpace,
    /// Records the publication of a directory, and mounts it in the mount namespace of the process.
    Publish {
        volume: u8,
    },
    Unpublish {
        volume: u8,
    },
    /// Compares the records with the mounts of the process, as the driver does when it starts.
    SyncPublications,
    /// Attaches an image to a loop device.
    Attach {
        volume: u8,
    },
    Detach {
        volume: u8,
    },
    /// Opens a volume and keeps it open.
    Hold {
        volume: u8,
    },
    /// Closes the volumes that the process holds.
    LetGo,
    /// Makes the process the same as one that has just started, before a case.
    Restart,
}

impl Operation {
    /// Returns `true` if only the driver performs it: the process whose mounts are the published volumes.
    pub(super) fn is_of_driver(self) -> bool {
        matches!(self, Self::Publish { .. } | Self::Unpublish { .. } | Self::SyncPublications)
    }

    /// Returns the requested capacity.
    pub(super) fn capacity(self) -> Option<u64> {
        match self {
            Self::Create { capacity, .. } | Self::Clone { capacity, .. } | Self::Expand { capacity, .. } => {
                Some(capacity)
            }
            _ => None,
        }
    }

    /// Returns the entries that the operation changes or locks.
    pub(super) fn entries(self) -> Vec<Entry> {
        match self {
            Self::Create { volume, .. }
            | Self::Expand { volume, .. }
            | Self::Delete { volume }
            | Self::Publish { volume }
            | Self::Unpublish { volume }
            | Self::Attach { volume }
            | Self::Detach { volume } => vec![Entry::Volume(volume)],
            Self::Clone { source, volume, .. } => vec![source, Entry::Volume(volume)],
            Self::Snapshot { source, snapshot } => vec![Entry::Volume(source), Entry::Snapshot(snapshot)],
            Self::DeleteSnapshot { snapshot } => vec![Entry::Snapshot(snapshot)],
            Self::EmptyTrash
            | Self::Recover
            | Self::CountSpace
            | Self::SyncPublications
            | Self::Hold { .. }
            | Self::LetGo
            | Self::Restart => Vec::new(),
        }
    }
}

/// The result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Outcome {
    Done,
    /// The capacity of the returned volume or snapshot.
    Capacity(u64),
    /// Whether the call deleted an entry.
    Deleted(bool),
    Failed(Failure),
}

pub(super) fn volume() -> impl Strategy<Value = u8> {
    0..VOLUMES
}

pub(super) fn form() -> impl Strategy<Value = Form> {
    prop_oneof![Just(Form::Directory), Just(Form::ThickImage), Just(Form::ThinImage)]
}

fn capacity() -> impl Strategy<Value = u64> {
    prop_oneof![
        14 => (1..=3u64).prop_map(|mib| mib * MIB),
        2 => Just(LARGE),
        1 => Just(TOO_LARGE),
    ]
}

pub(super) fn operation() -> impl Strategy<Value = Operation> {
    let snapshot = || 0..SNAPSHOTS;
    let source = prop_oneof![
        2 => volume().prop_map(Entry::Volume),
        1 => snapshot().prop_map(Entry::Snapshot),
    ];
    prop_oneof![
        14 => (volume(), form(), capacity())
            .prop_map(|(volume, form, capacity)| Operation::Create { volume, form, capacity }),
        8 => (source, volume(), form(), capacity())
            .prop_map(|(source, volume, form, capacity)| Operation::Clone { source, volume, form, capacity }),
        4 => (volume(), snapshot()).prop_map(|(source, snapshot)| Operation::Snapshot { source, snapshot }),
        5 => (volume(), capacity()).prop_map(|(volume, capacity)| Operation::Expand { volume, capacity }),
        7 => volume().prop_map(|volume| Operation::Delete { volume }),
        2 => snapshot().prop_map(|snapshot| Operation::DeleteSnapshot { snapshot }),
        6 => Just(Operation::EmptyTrash),
        4 => Just(Operation::Recover),
        2 => Just(Operation::CountSpace),
        2 => volume().prop_map(|volume| Operation::Publish { volume }),
        3 => volume().prop_map(|volume| Operation::Unpublish { volume }),
        2 => volume().prop_map(|volume| Operation::Attach { volume }),
        3 => volume().prop_map(|volume| Operation::Detach { volume }),
        2 => volume().prop_map(|volume| Operation::Hold { volume }),
        2 => Just(Operation::LetGo),
    ]
}
