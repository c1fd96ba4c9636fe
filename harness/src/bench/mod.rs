//! Benchmarks. Separate programs measure; this module prints tables, draws plots, checks thresholds and compares runs.
//!
//! A run writes `report.json` and `report.html` below `target/bench`. The first has the rows of all its benchmarks with their
//! samples ([`results`]), the second is for readers ([`report`]).

mod audit_log;
mod batch;
mod burst;
mod catalogue;
mod clones;
mod cluster;
mod comparison;
mod deletion;
mod footprint;
mod growth;
mod guest;
mod here;
mod html;
mod in_memory;
mod io;
mod loop_devices;
mod mann_whitney;
mod measurement;
mod memory;
mod memory_controller;
mod metrics_page;
mod node;
mod node_process;
mod outcome;
mod plot;
mod processor_time;
mod provision;
mod report;
mod results;
mod rpc;
mod run;
mod scale;
mod source;
mod table;
mod threshold;
mod volume_stats;

pub(crate) use self::catalogue::list;
pub use self::outcome::Args;
pub use self::run::run;
