//! The metrics for Prometheus. csi/monitoring/README.md lists them, and tests compare that list with the served
//! metrics.

mod calls;
mod registry;
mod sample;

pub(crate) use calls::{Calls, Metered};
pub(crate) use registry::register;
pub(crate) use sample::DriverSample;
