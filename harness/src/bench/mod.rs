//! Benchmarks. Separate programs measure; this module prints tables, checks thresholds and compares runs.
//!
//! A run writes `report.json` and `report.txt` below `target/bench`. The first has the rows of all its benchmarks with their
//! samples ([`results`]), the second is for readers ([`report`]).
//!
//! Each benchmark is an entry of the [`catalogue`]: a function that measures and returns rows, and requirements on these rows
//! ([`threshold`]). Contenders that are compared take turns ([`turns`]), so that other load on the machine affects all alike.

mod args;
mod audit_log;
mod batch;
mod burst;
mod catalogue;
mod cluster;
mod comparison;
mod counting_proxy;
mod deletion;
mod footprint;
mod growth;
mod guest;
mod mann_whitney;
mod measurement;
mod memory;
mod metrics;
mod node;
mod node_process;
mod peer;
mod process;
mod programs;
mod provision;
mod report;
mod results;
mod run;
mod scale;
mod threshold;
mod turns;

pub use self::args::Args;
pub(crate) use self::catalogue::list;
pub use self::run::run;
