//! What the driver's programs serve over HTTP: `/metrics`, `/healthz` and `/readyz`.
//!
//! It knows neither volumes nor Kubernetes nor CSI: a program says what the pages say ([`Pages`]), and this serves them.

#![forbid(unsafe_code)]

mod address;
#[cfg(any(test, feature = "documentation"))]
pub mod documentation;
mod gauges;
mod server;

pub use address::HttpAddress;
pub use gauges::Gauges;
pub use server::{Pages, serve};
