//! The metrics for Prometheus. README.md lists their names, and a test compares that list with the served metrics.

mod calls;
mod registry;
mod sample;

pub(crate) use calls::{Calls, Metered};
pub(crate) use registry::register;
pub(crate) use sample::Sample;
