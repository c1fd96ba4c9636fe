//! What is done with volumes. Everything is found out anew from the store, the mount table and the loop devices,
//! so a driver that was restarted, or was never told that a volume is staged, does the same. All of it blocks.

mod block_device;
mod directory;
mod expand;
mod inventory;
mod loop_node;
mod mounted_devices;
mod operations;
mod provision;
mod publish;
mod published_mounts;
mod snapshots;
mod stale_device;
mod stats;
mod unavailable;
mod volume;
mod volume_locks;

pub(crate) use inventory::Page;
pub(crate) use operations::VolumeOperations;
pub(crate) use publish::Volumes;
pub(crate) use snapshots::SnapshotPage;
pub(crate) use volume::{UNIT as MIN_VOLUME_SIZE, VolumeInfo};
pub(crate) use volume_locks::LockMode;
