//! Drives the built binaries, images and manifests of this workspace against real kernels and a
//! real kubelet. Links to none of the other crates: what it knows, a user can see.
//!
//! Two halves share one crate. [`guest`] runs inside the virtual machine as PID 1 and is built
//! static and without the `host` feature; everything else runs on the host.

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
