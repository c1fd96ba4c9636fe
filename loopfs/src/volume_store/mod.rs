//! A file system full of volumes.
//!
//! Every operation can be repeated. A crash at any point leaves either the state before or the state after, and
//! [`VolumeStore::recover`] removes incomplete volumes.

mod clone;
mod condition;
mod create;
mod device_size;
mod expand;
mod foreign;
mod id;
mod in_use;
mod on_disk;
mod pending;
mod recover;
mod settings;
mod snapshot;
mod source;
mod space;
mod spec;
mod staging;
mod store;
mod trash;
mod volume;

pub use condition::{AbnormalReason, Condition};
pub use device_size::{Changes, VolumeWatch};
pub use foreign::{ChargedTo, ForeignEvidence, ForeignFiles};
pub use id::{SnapshotId, VolumeId};
pub use on_disk::{Annotations, Image};
pub use recover::Recovered;
pub use settings::{Setting, SettingError};
pub use snapshot::Snapshot;
pub use source::{ContentSource, OwnedContentSource};
pub use space::Space;
pub use spec::{
    ImageSpec, LogicalBlockSize, Provisioning, StoreCounts, StoreOptions, VolumeKind, VolumeSpec,
};
pub use store::VolumeStore;
#[cfg(feature = "preflight")]
pub(crate) use store::verify_data_directory;
pub use volume::{InodeStats, Volume, VolumeStats};
