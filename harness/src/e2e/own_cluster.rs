//! The start of a cluster for one run, with the evidence of a start that fails.

use std::path::{Path, PathBuf};

use anyhow::Result;
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Cluster, ClusterProfile, ClusterSpec, Durability, Node, Parts};

use super::state_dump;
use crate::test_env::node_debug;

/// The namespace of the claims and pods of the stories.
pub(super) const NAMESPACE: &str = "loopfs-e2e";

/// The directories of a run: that of the cluster, that of its logs, and that of the state of the cluster after a failure.
#[derive(Debug)]
pub(super) struct Places<'a> {
    pub(super) dir: PathBuf,
    pub(super) logs: PathBuf,
    pub(super) reports: &'a Path,
}

/// Starts the cluster. If the node boots and a later step fails, the archive of `dbg bundle` is in the reports.
pub(super) async fn start(
    session: &Session,
    steps: &mut Steps<'_>,
    parts: impl Future<Output = Result<Parts>>,
    Places { dir, logs, reports }: Places<'_>,
) -> StepResult<Cluster> {
    let parts = steps.step("build programs, images and disks", parts).await?;
    // The cluster of a test need not survive a power cut of the machine.
    let spec = ClusterSpec { dir, logs, durability: Durability::Unsafe, profile: ClusterProfile::Default };
    let bundle = async |node: &Node| state_dump::try_write_bundle(node, reports).await;
    let started = Cluster::start_diagnosed(session, spec, parts, bundle);
    let cluster = steps.step("start a control plane and a node", started).await?;
    let granted = node_debug::grant(session, cluster.client());
    if let Err(failed) = steps.step("grant node-debug its rights", granted).await {
        state_dump::write_node(session, cluster.node(), reports).await;
        return Err(failed);
    }
    Ok(cluster)
}
