//! Operations on volumes. Each operation reads the current state from the store, the mount table and the loop devices.
//! It therefore works alike after a restart of the driver, and if the volume was staged without the driver's knowledge.
//! All operations block.

mod expand;
mod inventory;
mod operations;
mod provision;
mod publish;
mod snapshots;
mod stats;
mod unavailable;
mod volume;

pub(crate) use inventory::{Capacity, Page};
pub(crate) use operations::VolumeOperations;
pub(crate) use provision::NewVolume;
pub(crate) use publish::Volumes;
pub(crate) use snapshots::SnapshotPage;
pub(crate) use volume::{UNIT as MIN_VOLUME_SIZE, VolumeInfo};
