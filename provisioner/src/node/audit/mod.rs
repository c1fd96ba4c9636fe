//! Audits the volumes of the node: finds orphaned volumes, which no PersistentVolume names, and PersistentVolumes whose volume
//! is missing.
//!
//! The provisioner reports both in events. It removes an orphaned volume only if the administrator requests that, and after a
//! grace time, because an administrator may have deleted the PersistentVolume in order to bind its data again. The audit never
//! removes a volume that a PersistentVolume names, even if a person created that, and never a PersistentVolume.

mod compare;
mod findings;
mod named_by;
mod report;
mod run;

pub(crate) use self::findings::LatestFindings;
pub(crate) use self::report::report;
pub(crate) use self::run::{AuditSettings, Collection, node_volumes, run};
