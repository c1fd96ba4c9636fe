//! Serves the HTTP endpoints of the driver's programs: `/metrics`, `/healthz` and `/readyz`.
//!
//! This crate has no knowledge of volumes, Kubernetes or CSI. A program implements [`HealthEndpoints`], and this crate
//! serves the results on its [`Listeners`].

#![forbid(unsafe_code)]

mod address;
mod connections;
#[cfg(any(test, feature = "documentation"))]
pub mod documentation;
mod gauges;
mod latest;
mod server;
#[cfg(test)]
mod tests;

pub use address::HttpAddress;
pub use connections::connection_to_close;
pub use gauges::{Gauges, register_readiness};
pub use server::{HealthEndpoints, Listeners, serve};
