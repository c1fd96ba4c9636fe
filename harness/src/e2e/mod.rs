//! The main job, end to end: claims on a real Kubernetes node, mounted, read-only, block, and grown.
//!
//! The stories run against a cluster of the harness's own or against any other by its
//! kubeconfig: the same manifests, the same cases. What only the node itself can tell is asked of nodes
//! of ours, and reported as skipped elsewhere.

mod breakage;
mod run;
mod self_check;
mod state_dump;
mod stories;
mod story;
mod telling;

pub(crate) use self::run::install_driver;
pub use self::run::{Args, run};
