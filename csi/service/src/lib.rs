//! What the driver's programs have in common: the log, signals, tasks, back-off, and the HTTP endpoints `/metrics`, `/healthz` and
//! `/readyz`.
//!
//! A program parses its options ([`LogArgs`], [`HealthArgs`]) and calls [`run`], which serves until a signal arrives. It spawns its work in
//! [`Tasks`], of which each is needed, and implements [`HealthEndpoints`]. This crate has no knowledge of volumes, Kubernetes or CSI.

#![forbid(unsafe_code)]

mod address;
mod args;
mod backoff;
mod connections;
#[cfg(any(test, feature = "documentation"))]
pub mod documentation;
mod gauges;
mod latest;
mod process;
mod server;
mod tasks;
#[cfg(test)]
mod tests;

pub use address::HttpAddress;
pub use args::{HealthArgs, LogArgs, absolute_path, node_name, socket_path};
pub use backoff::{Delays, ExponentialBackoff};
pub use connections::connection_to_close;
pub use gauges::{Gauges, register_readiness, registry};
pub use process::run;
pub use server::{HealthEndpoints, Listeners, serve_health};
pub use tasks::Tasks;
