//! Tests the built binaries, images and manifests of this workspace with real kernels and a real kubelet. It
//! links to none of the other crates, so it sees only what a user can see.
//!
//! The programs inside the virtual machines are other packages: `testvm-guest` (PID 1 and the messages that it
//! exchanges with this crate) and `volume-check` (the program of the test pods).

pub mod args;
pub mod bench;
mod builds;
pub mod cache;
pub mod cluster;
pub mod e2e;
mod fake_nodes;
pub mod go_build;
pub mod images;
pub mod lanes;
mod nodes;
pub mod packages;
pub mod process;
pub mod progress;
mod project;
pub mod report;
pub mod rust_build;
pub mod session;
mod test_env;
mod test_machine;
pub mod up;
pub mod vm;
