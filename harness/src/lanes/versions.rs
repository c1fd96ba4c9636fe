//! The versions lane: claims and pods on each minor release of Kubernetes, and on nodes with each kernel.

use anyhow::Result;
use testvm::images::kernel::Kernel;
use testvm::report::Report;
use testvm::session::Session;
use testvm_cluster::KubernetesMinor;

use super::clusters::{self, LaneCluster};
use crate::node_options::{KubernetesOptions, NodeOptions};

/// Runs the stories on each release with the default kernel, and on each other kernel with the default release.
pub(super) async fn run(session: &Session) -> Result<Report> {
    let default_kernel = Kernel::default_name(session)?;
    let releases = KubernetesMinor::ALL.map(|minor| LaneCluster {
        name: format!("kubernetes-{}", minor.name()),
        kubernetes: KubernetesOptions::of_minor(minor),
        nodes: NodeOptions::default(),
    });
    let kernels = Kernel::names(&session.workspace)?.into_iter().filter(|name| *name != default_kernel);
    let kernels = kernels.map(|kernel| LaneCluster {
        name: format!("kernel-{kernel}"),
        kubernetes: KubernetesOptions::default(),
        nodes: NodeOptions::default().with_kernel(Some(kernel)),
    });
    clusters::run(session, "versions", releases.into_iter().chain(kernels).collect()).await
}
