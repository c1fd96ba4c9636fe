//! What benchmarks on a real cluster share: the cluster, the driver in it, and the description of the node.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::measurement::{Environment, Machine, Row};
use super::outcome::Args;
use crate::cache;
use crate::cluster::{Cluster, ClusterProfile, ClusterSpec, Durability, Node, Parts};
use crate::e2e;
use crate::session::Session;
use crate::test_env::workload::create_namespace;

/// Where claims and pods of benchmarks are.
pub(super) const NAMESPACE: &str = "loopfs-bench";
/// The class of the manifests.
pub(super) const CLASS: &str = "loopfs";

/// For a program that reads a file of /proc, on an emulated processor.
const READ_TIME: Duration = Duration::from_secs(60);

/// Starts a cluster for figures with the driver and an empty [`NAMESPACE`] in it, has `measure` take the rows there, and ends it. The
/// node has the `tools` besides those of Kubernetes: what each is called there, and where it is here.
pub(super) async fn measured(
    session: &Session,
    args: &Args,
    bench: &str,
    tools: &[(String, PathBuf)],
    measure: impl AsyncFnOnce(&Cluster, &Node) -> Result<Vec<Row>>,
) -> Result<Environment> {
    anyhow::ensure!(args.kernel.is_none(), "the nodes of a cluster have one kernel: leave --kernel out");
    let parts = Parts::build_with(session, None, tools).await?;
    let place = format!("node in a virtual machine ({})", parts.accelerator());
    let directory = tempfile::tempdir().context("make a directory")?;
    let logs = session.workspace.reports("bench").join(bench);
    // An earlier run's would be read as this one's.
    cache::remove_dir(&logs)?;
    let spec = ClusterSpec {
        dir: directory.path().to_owned(),
        logs,
        durability: Durability::Unsafe,
        profile: ClusterProfile::Benchmark,
    };
    let cluster = Cluster::start(session, spec, parts).await?;
    let measured = async {
        let node = cluster.nodes().first().context("the cluster has no node")?;
        let step = session.progress.step("install the driver");
        e2e::install_driver(session, &cluster).await?;
        create_namespace(cluster.client(), NAMESPACE).await?;
        step.done("");
        let rows = measure(&cluster, node).await?;
        anyhow::Ok(Environment { place, machine: machine(node).await?, rows })
    };
    let measured = measured.await;
    // Also when that failed: the end of the logs is worth having.
    let stopped = cluster.stop().await;
    let part = measured?;
    stopped?;
    Ok(part)
}

async fn machine(node: &Node) -> Result<Machine> {
    let read = async |path: &str| node.output(&["cat", path], READ_TIME).await;
    let (cpuinfo, kernel) = (read(Machine::CPUINFO).await?, read(Machine::KERNEL).await?);
    Ok(Machine::of(&cpuinfo, &kernel, "xfs"))
}
