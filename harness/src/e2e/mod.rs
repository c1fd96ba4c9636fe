//! The end-to-end tests: claims on a real Kubernetes node, mounted, read-only, as block devices, and expanded.
//!
//! The stories run against a cluster of the harness's own or against any other by its
//! kubeconfig: the same manifests, the same cases. Steps that need the node itself run on nodes of the
//! harness's own, and are reported as skipped on other clusters.

mod args;
mod console;
mod doctor;
mod documents;
mod driver;
mod host_service;
mod kind;
mod parts;
mod run;
mod runner;
mod sabotages;
mod self_check;
mod state_dump;
mod stories;
mod story;

pub use self::args::{Args, CommandArgs};
pub(crate) use self::driver::{install_driver, install_driver_with_snapshots, nothing_left, write_state};
pub use self::run::run;
pub(crate) use self::stories::lines;
pub(crate) use self::story::Set;
