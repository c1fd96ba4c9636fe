//! The node lane: claims and pods on nodes with another kubelet, another losetup, without tools, or with the kubelet's
//! directory on the data disk.

use anyhow::Result;
use testvm::report::Report;
use testvm::session::Session;

use super::clusters::{self, LaneCluster};
use crate::node_options::{KubernetesOptions, NodeOptions};

/// Runs the stories on every combination, on nodes with this kernel or the default one.
pub(super) async fn run(
    session: &Session,
    kubernetes: &KubernetesOptions,
    kernel: Option<&str>,
) -> Result<Report> {
    let cluster = |(name, nodes): (&str, NodeOptions)| LaneCluster {
        name: name.to_owned(),
        kubernetes: kubernetes.clone(),
        nodes: nodes.with_kernel(kernel.map(str::to_owned)),
    };
    clusters::run(session, "node", NodeOptions::combinations().map(cluster).into()).await
}
