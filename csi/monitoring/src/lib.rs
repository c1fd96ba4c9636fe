//! What the driver's programs serve over HTTP: `/metrics`, `/healthz` and `/readyz`.
//!
//! It knows neither volumes nor Kubernetes nor CSI: a program says what the pages say ([`Pages`]), and this serves them on
//! its [`Listeners`].

#![forbid(unsafe_code)]

mod address;
mod connections;
#[cfg(any(test, feature = "documentation"))]
pub mod documentation;
mod gauges;
mod latest;
mod server;

pub use address::HttpAddress;
pub use gauges::Gauges;
pub use server::{Listeners, Pages, serve};
