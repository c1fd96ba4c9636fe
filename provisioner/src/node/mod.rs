//! Duties of a provisioner towards its own node: its volumes, and the objects that concern it.

pub(crate) mod audit;
pub(crate) mod capacity;
pub(crate) mod claims;
pub(crate) mod classes;
pub(crate) mod cleanup;
pub(crate) mod context;
pub(crate) mod custody;
pub(crate) mod data_source;
pub(crate) mod delete;
pub(crate) mod foreign_files;
pub(crate) mod health_endpoints;
pub(crate) mod lost_disk;
pub(crate) mod operations;
pub(crate) mod persistent_volumes;
pub(crate) mod placement;
pub(crate) mod process;
pub(crate) mod provision;
pub(crate) mod references;
pub(crate) mod reschedule;
pub(crate) mod resize;
pub(crate) mod storage_watch;
pub(crate) mod volume_deletion;
