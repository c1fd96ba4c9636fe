//! The parts that benchmarks on a real cluster share: the cluster, the driver in it, and the description of
//! the node.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use testvm::cache;
use testvm::session::Session;
use testvm_cluster::{Cluster, ClusterProfile, ClusterSpec, Durability, KubernetesMinor, Node};

use super::args::Args;
use super::measurement::{Environment, Machine, Samples};
use crate::e2e;
use crate::node_options::NodeOptions;
use crate::nodes::{self, Additions};
use crate::test_env::workload::create_namespace;

/// The namespace of the claims and pods of benchmarks.
pub(super) const NAMESPACE: &str = "loopfs-bench";
/// The StorageClass of the manifests.
pub(super) const CLASS: &str = "loopfs";
/// The user name of the driver's pods at the API server.
pub(super) const DRIVER_USER: &str = "system:serviceaccount:loopfs-system:loopfs-provisioner";

/// The programs of the driver's pod.
pub(super) const OUR_PROGRAMS: [&str; 2] = ["/loopfs-provisioner node", "/loopfs-csi"];

/// The number of directories that [`fill`] fills concurrently: one for each processor of the node.
const FILL_CONCURRENCY: usize = 2;

/// Programs for a node: the name of each one there, and its path on the host.
pub(super) type Tools = [(String, PathBuf)];

/// Starts a cluster with the benchmark profile, the driver and an empty [`NAMESPACE`], runs `measure` there,
/// and stops the cluster. The node is that of `options`. It has `tools` in addition to those of Kubernetes. The logs are in
/// the directory `name` of the benchmarks' reports.
pub(super) async fn measured(
    session: &Session,
    args: &Args,
    name: &str,
    options: NodeOptions,
    tools: &Tools,
    measure: impl AsyncFnOnce(&Cluster, &Node) -> Result<Samples>,
) -> Result<Environment> {
    let options = options.with_kernel(args.kernel.clone());
    let kubernetes = KubernetesMinor::default();
    let additions = Additions { tools: tools.to_vec(), ..Additions::default() };
    let profile = ClusterProfile::Benchmark;
    let parts = Box::pin(nodes::parts(session, kubernetes, &options, profile, additions)).await?;
    let place = format!("node in a virtual machine ({})", parts.accelerator());
    let directory = tempfile::tempdir().context("create a temporary directory")?;
    let logs = session.workspace.reports("bench").join(name);
    // The logs of an earlier run must not be read as those of this run.
    cache::remove_dir(&logs)?;
    let spec =
        ClusterSpec { dir: directory.path().to_owned(), logs, durability: Durability::Unsafe, profile };
    let cluster = Cluster::start(session, spec, parts).await?;
    let measured = async {
        let step = session.progress.step("install the driver");
        e2e::install_driver(session, &cluster).await?;
        create_namespace(cluster.client(), NAMESPACE).await?;
        step.done("");
        let node = cluster.node();
        let rows = measure(&cluster, node).await?.0;
        let read = async |path: &str| node.output(&["cat", path]).await;
        let (cpuinfo, kernel) = (read(Machine::CPUINFO).await?, read(Machine::KERNEL).await?);
        let machine = Machine::of(&cpuinfo, &kernel, "xfs", Some(kubernetes.name()));
        Ok(Environment { place, machine, rows })
    };
    let measured: Result<Environment> = Box::pin(measured).await;
    // Also after a failure the cluster is stopped in order, so that the logs are complete.
    let stopped = cluster.stop().await;
    let environment = measured?;
    stopped?;
    Ok(environment)
}

/// Creates this many files in each of the directories of a node. Calls `note` with the number of directories that have them.
pub(super) async fn fill(
    node: &Node,
    directories: &[String],
    files: u64,
    timeout: Duration,
    note: impl Fn(usize),
) -> Result<()> {
    let files = files.to_string();
    let filled = futures::stream::iter(directories).map(async |directory| {
        let script = "cd \"$1\" && touch $(seq \"$2\")";
        let filled = node.output_within(&["sh", "-c", script, "sh", directory, &files], timeout).await;
        filled.with_context(|| format!("fill {directory}"))
    });
    let mut filled = filled.buffer_unordered(FILL_CONCURRENCY);
    let mut done = 0;
    while filled.try_next().await?.is_some() {
        done += 1;
        note(done);
    }
    Ok(())
}
