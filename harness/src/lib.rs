//! Tests the built binaries, images and manifests of this workspace with real kernels and a real kubelet. It
//! links to none of the other crates, so it sees only what a user can see.
//!
//! The crate has two parts. [`guest`] runs as PID 1 in the virtual machine; it is built static and without
//! the `host` feature. All other modules run on the host.

pub mod guest;

#[cfg(feature = "host")]
pub mod args;
#[cfg(feature = "host")]
pub mod bench;
#[cfg(feature = "host")]
mod builds;
#[cfg(feature = "host")]
pub mod cache;
#[cfg(feature = "host")]
pub mod cluster;
#[cfg(feature = "host")]
pub mod e2e;
#[cfg(feature = "host")]
mod fake_nodes;
#[cfg(feature = "host")]
pub mod go_build;
#[cfg(feature = "host")]
pub mod images;
#[cfg(feature = "host")]
pub mod lanes;
#[cfg(feature = "host")]
pub mod packages;
#[cfg(feature = "host")]
pub mod process;
#[cfg(feature = "host")]
pub mod progress;
#[cfg(feature = "host")]
pub mod report;
#[cfg(feature = "host")]
pub mod rust_build;
#[cfg(feature = "host")]
pub mod session;
#[cfg(feature = "host")]
mod test_env;
#[cfg(feature = "host")]
mod test_machine;
#[cfg(feature = "host")]
pub mod up;
#[cfg(feature = "host")]
pub mod vm;
