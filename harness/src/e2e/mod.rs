//! The end-to-end tests: claims on a real Kubernetes node, mounted, read-only, as block devices, and expanded.
//!
//! The stories run against a cluster of the harness's own or against any other by its
//! kubeconfig: the same manifests, the same cases. Steps that need the node itself run on nodes of the
//! harness's own, and are reported as skipped on other clusters.

mod catalogue;
mod console;
mod doctor;
mod documents;
mod faults;
mod host_service;
mod kind;
mod own_cluster;
mod restarts;
mod run;
mod runner;
mod self_check;
mod state_dump;
mod stories;
mod upgrade;

pub(crate) use self::catalogue::descriptions;
pub use self::run::{Args, CommandArgs, run};
pub(crate) use self::run::{
    install_driver, install_driver_with_snapshots, nothing_left, replace_driver, run_long, run_on_kind,
    run_on_nodes, run_self_check, run_upgrade, run_with_other_projects, write_state,
};
