//! Clusters of lanes, and stories on several of them, one after the other.

use std::time::Instant;

use anyhow::Result;
use testvm::cache;
use testvm::images::kernel::Kernel;
use testvm::progress::seconds;
use testvm::report::Report;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ClusterSpec, Durability, KubernetesMinor};

use super::passes::require_pass;
use crate::e2e::{self, Set};
use crate::node_options::{KubernetesOptions, NodeOptions};

/// The name of a cluster, which can be the name of a directory, and the run on it.
pub(super) type Cluster = (String, e2e::Args);

/// Returns a cluster of a lane or part with this name. Its reports have the logs.
///
/// # Errors
/// The reports of an earlier run, which must not be read as those of this one, cannot be removed.
pub(super) fn spec(session: &Session, name: &str, profile: ClusterProfile) -> Result<ClusterSpec> {
    let reports = session.workspace.reports(name);
    cache::remove_dir(&reports)?;
    Ok(ClusterSpec {
        dir: session.workspace.target().join(format!("{name}-cluster")),
        logs: reports.join("logs"),
        durability: Durability::Unsafe,
        profile,
    })
}

/// Returns clusters with each kind of nodes: another kubelet, another losetup, without tools, or with the kubelet's directory on the
/// data disk. They have this kernel, or the default one.
pub(super) fn kinds_of_nodes(kubernetes: &KubernetesOptions, kernel: Option<&str>) -> Vec<Cluster> {
    let cluster = |(name, nodes): (&str, NodeOptions)| {
        let nodes = nodes.with_kernel(kernel.map(str::to_owned));
        (name.to_owned(), e2e::Args::of(Set::Node, kubernetes).with_nodes(nodes))
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
        (name, e2e::Args::of(Set::Node, &KubernetesOptions::of_minor(minor)))
    });
    let kernels = Kernel::names(&session.workspace)?.into_iter().filter(|name| *name != default_kernel);
    let kernels = kernels.map(|kernel| {
        let nodes = NodeOptions::default().with_kernel(Some(kernel.clone()));
        let args = e2e::Args::of(Set::Node, &KubernetesOptions::default()).with_nodes(nodes);
        (format!("kernel-{kernel}"), args)
    });
    Ok(releases.into_iter().chain(kernels).collect())
}

/// Returns the clusters on which each story can be broken: with the default nodes, with a kubelet on the data disk, and with the programs
/// of other projects.
pub(super) fn self_check(kubernetes: &KubernetesOptions) -> Vec<Cluster> {
    let of = |set| e2e::Args::of(set, kubernetes).with_self_check();
    let on_data_disk = of(Set::DataDisk).with_nodes(NodeOptions::default().with_kubelet_on_data_disk());
    let clusters =
        [("default", of(Set::All)), ("data-disk", on_data_disk), ("other-projects", of(Set::OtherProjects))];
    clusters.map(|(name, args)| (name.to_owned(), args)).into()
}

/// Runs the stories on every cluster. All run even if one fails. The logs of each are in a directory of
/// its own in the reports of `part`.
pub(super) async fn run(session: &Session, part: &str, clusters: Vec<Cluster>) -> Result<Report> {
    let mut report = Report::new();
    for (name, args) in clusters {
        let started = Instant::now();
        let args = args.with_reports(format!("{part}/{name}"));
        let mut cases = require_pass("e2e", e2e::run(session, &args).await?);
        cases.prefix_suites(&name);
        let (summary, time) = (cases.summary(), seconds(started.elapsed()));
        session.progress.line(format!("cluster {name}: {summary} in {time}{}", cases.failures()));
        report.append(cases);
    }
    Ok(report)
}
