//! Benchmarks. Separate programs measure; this module prints tables, draws plots and checks thresholds.
//!
//! Each benchmark writes `NAME.json` below `target/bench`, and `NAME.svg` if it has a plot.

mod batch;
mod clones;
mod cluster;
mod deletion;
mod growth;
mod guest;
mod here;
mod in_memory;
mod loop_devices;
mod measurement;
mod node;
mod outcome;
mod plot;
mod provision;
mod run;
mod table;
mod threshold;
mod volume_stats;

pub use self::outcome::Args;
pub use self::run::run;
