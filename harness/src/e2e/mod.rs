//! The main job, end to end: claims on a real Kubernetes node, mounted, read-only, block, and grown.
//!
//! The scenarios run against a cluster of the harness's own or against any other by its
//! kubeconfig: the same manifests, the same cases. What only the node itself can tell is asked of nodes
//! of ours, and reported as skipped elsewhere.

mod catalogue;
mod faults;
mod run;
mod runner;
mod scenario;
mod scenarios;
mod self_check;
mod state_dump;

pub(crate) use self::run::install_driver;
pub use self::run::{Args, run};
