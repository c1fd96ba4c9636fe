//! Runs stories on several clusters, one after the other.

use std::time::Instant;

use anyhow::Result;
use testvm::images::kernel::Kernel;
use testvm::progress::seconds;
use testvm::report::Report;
use testvm::session::Session;
use testvm_cluster::KubernetesMinor;

use super::passes::require_pass;
use crate::e2e::{self, Set};
use crate::node_options::{KubernetesOptions, NodeOptions};

/// The name of a cluster, which can be the name of a directory, its programs of Kubernetes, and its nodes.
pub(super) type Cluster = (String, KubernetesOptions, NodeOptions);

/// Returns clusters with each kind of nodes: another kubelet, another losetup, without tools, or with the kubelet's directory on the
/// data disk. They have this kernel, or the default one.
pub(super) fn kinds_of_nodes(kubernetes: &KubernetesOptions, kernel: Option<&str>) -> Vec<Cluster> {
    let cluster = |(name, nodes): (&str, NodeOptions)| {
        (name.to_owned(), kubernetes.clone(), nodes.with_kernel(kernel.map(str::to_owned)))
    };
    NodeOptions::combinations().map(cluster).into()
}

/// Returns a cluster of each release of Kubernetes with the default kernel, and one of each other kernel with the default release.
///
/// # Errors
/// The definitions of the kernels cannot be read.
pub(super) fn versions(session: &Session) -> Result<Vec<Cluster>> {
    let default_kernel = Kernel::default_name(session)?;
    let releases = KubernetesMinor::ALL.map(|minor| {
        let name = format!("kubernetes-{}", minor.name());
        (name, KubernetesOptions::of_minor(minor), NodeOptions::default())
    });
    let kernels = Kernel::names(&session.workspace)?.into_iter().filter(|name| *name != default_kernel);
    let kernels = kernels.map(|kernel| {
        let nodes = NodeOptions::default().with_kernel(Some(kernel.clone()));
        (format!("kernel-{kernel}"), KubernetesOptions::default(), nodes)
    });
    Ok(releases.into_iter().chain(kernels).collect())
}

/// Runs the stories that depend on the node on every cluster. All run even if one fails. The logs of each are in a directory of
/// its own in the reports of `part`.
pub(super) async fn run(session: &Session, part: &str, clusters: Vec<Cluster>) -> Result<Report> {
    let mut report = Report::new();
    for (name, kubernetes, nodes) in clusters {
        let started = Instant::now();
        let args = e2e::Args::of(Set::Node, &kubernetes, format!("{part}/{name}")).with_nodes(nodes);
        let mut cases = require_pass("e2e", e2e::run(session, &args).await?);
        cases.prefix_suites(&name);
        let (summary, time) = (cases.summary(), seconds(started.elapsed()));
        session.progress.line(format!("cluster {name}: {summary} in {time}{}", cases.failures()));
        report.append(cases);
    }
    Ok(report)
}
