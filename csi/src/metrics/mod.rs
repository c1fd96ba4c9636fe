//! What a Prometheus server is told. The names are listed in README.md, which a test compares with what is served.

mod calls;
mod registry;
mod sample;

pub(crate) use calls::{Calls, Metered};
pub(crate) use registry::register;
pub(crate) use sample::Sample;
