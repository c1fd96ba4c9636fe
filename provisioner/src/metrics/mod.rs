//! The metrics for Prometheus. csi/monitoring/README.md lists them, and a test compares that list with the served
//! metrics.

mod findings;
mod operations;
mod sample;

pub(crate) use self::findings::{AuditFindings, LatestFindings};
pub(crate) use self::operations::{Operation, Operations};
pub(crate) use self::sample::{POLICIES_ENFORCED, ProvisionerSample, register};
