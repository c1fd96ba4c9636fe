//! The node's storage: whether volumes can be served, the probes that determine it, and the cleanup of deleted volumes.

mod monitor;

mod probe;
mod trash_cleanup;

pub(crate) use monitor::{Readiness, StorageMonitor, require_filesystem};
pub(crate) use probe::Probe;
pub(crate) use trash_cleanup::TrashCleanup;
