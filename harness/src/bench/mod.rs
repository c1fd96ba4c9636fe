//! Benchmarks. Programs of their own measure; this module prints tables, draws plots and checks thresholds.
//!
//! Each writes `NAME.json` and, where there is something to draw, `NAME.svg` below `target/bench`.

mod batch;
mod clones;
mod cluster;
mod deletion;
mod growth;
mod guest;
mod in_memory;
mod loop_devices;
mod measurement;
mod outcome;
mod plot;
mod provision;
mod run;
mod table;
mod threshold;
mod volume_stats;

pub use self::outcome::Args;
pub use self::run::run;
