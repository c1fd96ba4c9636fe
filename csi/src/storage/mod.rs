//! The node's storage: whether it can be used, the probes that find that out, and the trash of deleted volumes.

mod gate;
mod janitor;
mod probe;

pub(crate) use gate::{Health, Storage, StorageGate};
pub(crate) use janitor::Janitor;
pub(crate) use probe::Probe;
