//! The node's storage: whether it can be used, the probes that find that out, and the trash of deleted volumes.

mod monitor;

mod probe;
mod trash_cleanup;

pub(crate) use monitor::{Readiness, Storage, StorageMonitor};
pub(crate) use probe::Probe;
pub(crate) use trash_cleanup::TrashCleanup;
