//! Tests the built binaries, images and manifests of this workspace with real kernels and a real kubelet. It
//! links to none of the other crates, so it sees only what a user can see.
//!
//! The parts that know nothing of loopfs are crates of their own: `testvm-cluster` (a control plane and its
//! nodes), `testvm` (images and virtual machines), and `testvm-guest` (PID 1 in them, and the messages between
//! both). `volume-check` is the program of the test pods, and `release` writes the files of a release.

pub mod args;
pub mod bench;
mod builds;
pub mod e2e;
mod fake_nodes;
pub mod fetch;
mod helm;
pub mod lanes;
mod listing;
mod node_options;
mod nodes;
mod project;
mod test_env;
pub mod up;
