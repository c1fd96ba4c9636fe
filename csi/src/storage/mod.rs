//! The node's storage: whether volumes can be served, the probes that determine it, and the cleanup of deleted volumes.

mod monitor;

mod probe;
mod throttle;
mod trash_cleanup;

pub(crate) use monitor::{Availability, Readiness, StorageMonitor, require_filesystem};
pub(crate) use probe::Probe;
pub(crate) use throttle::{BackgroundThrottle, ForegroundCalls};
pub(crate) use trash_cleanup::TrashCleanup;
