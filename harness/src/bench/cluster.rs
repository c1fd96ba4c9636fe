//! The parts that benchmarks on a real cluster share: the cluster, the driver in it, and the description of
//! the node.
//!
//! In a run of several benchmarks, those with the default nodes use one cluster ([`SharedCluster`]). Between two of them the
//! claims and pods are deleted and the driver is started again, so that none measures what another one left.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use tempfile::TempDir;
use testvm::cache;
use testvm::session::Session;
use testvm_cluster::api_error::api_error;
use testvm_cluster::waiting::{State, until};
use testvm_cluster::{Cluster, ClusterProfile, ClusterSpec, Durability, KubernetesSource, Node};

use super::args::Args;
use super::measurement::{Environment, Machine, Samples};
use crate::e2e;
use crate::node_options::NodeOptions;
use crate::nodes::{self, Additions};
use crate::test_env::environment::TestEnv;
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
/// The timeout of a program that reads a file of /proc, on an emulated processor.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout of the deletion of all claims and pods that a benchmark left.
const RESET_TIMEOUT: Duration = Duration::from_secs(900);

/// Programs for a node: the name of each one there, and its path on the host.
pub(super) type Tools = [(String, PathBuf)];

/// The cluster of the benchmarks with the default nodes. The first of them starts it, and [`SharedCluster::stop`] stops it.
#[derive(Default)]
pub(super) struct SharedCluster {
    /// The tools of all benchmarks. `None` if each benchmark has a cluster of its own.
    tools: Option<Vec<(String, PathBuf)>>,
    running: Option<BenchCluster>,
}

/// A running cluster with the benchmark profile, the driver and [`NAMESPACE`].
struct BenchCluster {
    cluster: Cluster,
    place: String,
    kubernetes: &'static str,
    /// Removed after the cluster, which has its files there.
    _directory: TempDir,
}

impl SharedCluster {
    /// Returns the value for a run of several benchmarks. `tools` are those of all of them.
    pub(super) fn with_tools(tools: Vec<(String, PathBuf)>) -> SharedCluster {
        SharedCluster { tools: Some(tools), running: None }
    }

    /// Runs `measure` on a cluster with the default nodes, which have `tools`. The logs are in the directory `name` of the
    /// benchmarks' reports. If benchmarks share the cluster, that is the name of the one that starts it.
    pub(super) async fn measured(
        &mut self,
        session: &Session,
        args: &Args,
        name: &str,
        tools: &Tools,
        measure: impl AsyncFnOnce(&Cluster, &Node) -> Result<Samples>,
    ) -> Result<Environment> {
        let Some(all_tools) = &self.tools else {
            return measured(session, args, name, NodeOptions::default(), tools, measure).await;
        };
        let absent = tools.iter().find(|tool| !all_tools.contains(tool));
        if let Some((name, _)) = absent {
            anyhow::bail!("the shared cluster has no {name}; run this benchmark alone");
        }
        let mut clean = None;
        if let Some(cluster) = self.running.take() {
            clean = Box::pin(cluster.reset(session)).await?;
        }
        let cluster = match clean {
            Some(cluster) => cluster,
            None => {
                let started = BenchCluster::start(session, args, name, NodeOptions::default(), all_tools);
                Box::pin(started).await?
            }
        };
        let measured = Box::pin(cluster.measure(measure)).await;
        match measured {
            Ok(part) => {
                self.running = Some(cluster);
                Ok(part)
            }
            // The next benchmark starts another cluster, because this one may be in any state.
            Err(error) => match cluster.cluster.stop().await {
                Ok(()) => Err(error),
                Err(stop) => Err(error.context(format!("the cluster did not stop either: {stop:#}"))),
            },
        }
    }

    /// Stops the cluster, if there is one.
    pub(super) async fn stop(self) -> Result<()> {
        match self.running {
            Some(cluster) => cluster.cluster.stop().await,
            None => Ok(()),
        }
    }
}

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
    let cluster = BenchCluster::start(session, args, name, options, tools).await?;
    let measured = Box::pin(cluster.measure(measure)).await;
    // Also after a failure the cluster is stopped in order, so that the logs are complete.
    let stopped = cluster.cluster.stop().await;
    let part = measured?;
    stopped?;
    Ok(part)
}

impl BenchCluster {
    async fn start(
        session: &Session,
        args: &Args,
        name: &str,
        options: NodeOptions,
        tools: &Tools,
    ) -> Result<BenchCluster> {
        let options = options.with_kernel(args.kernel.clone());
        let kubernetes = KubernetesSource::default();
        let additions = Additions { tools: tools.to_vec(), ..Additions::default() };
        let profile = ClusterProfile::Benchmark;
        let parts = Box::pin(nodes::parts(session, &kubernetes, &options, profile, additions)).await?;
        let place = format!("node in a virtual machine ({})", parts.accelerator());
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let logs = session.workspace.reports("bench").join(name);
        // The logs of an earlier run must not be read as those of this run.
        cache::remove_dir(&logs)?;
        let spec =
            ClusterSpec { dir: directory.path().to_owned(), logs, durability: Durability::Unsafe, profile };
        let cluster = Cluster::start(session, spec, parts).await?;
        let kubernetes = kubernetes.minor.name();
        let started = BenchCluster { cluster, place, kubernetes, _directory: directory };
        let installed = started.install(session).await;
        match installed {
            Ok(()) => Ok(started),
            Err(error) => {
                // For the logs. The installation is what failed.
                drop(started.cluster.stop().await);
                Err(error)
            }
        }
    }

    async fn install(&self, session: &Session) -> Result<()> {
        let step = session.progress.step("install the driver");
        e2e::install_driver(session, &self.cluster).await?;
        create_namespace(self.cluster.client(), NAMESPACE).await?;
        step.done("");
        Ok(())
    }

    async fn measure(
        &self,
        measure: impl AsyncFnOnce(&Cluster, &Node) -> Result<Samples>,
    ) -> Result<Environment> {
        let node = self.cluster.nodes().first().context("the cluster has no node")?;
        let rows = measure(&self.cluster, node).await?.rows();
        let read = async |path: &str| node.output(&["cat", path], READ_TIMEOUT).await;
        let (cpuinfo, kernel) = (read(Machine::CPUINFO).await?, read(Machine::KERNEL).await?);
        let machine = Machine::of(&cpuinfo, &kernel, "xfs", Some(self.kubernetes));
        Ok(Environment { place: self.place.clone(), machine, rows })
    }

    /// Prepares the cluster for the next benchmark. Returns `None` if that failed and the cluster was stopped.
    async fn reset(self, session: &Session) -> Result<Option<BenchCluster>> {
        let step = session.progress.step("prepare the cluster for the next benchmark");
        let reset = async {
            self.delete_claims(session).await?;
            // The memory of a process that served another benchmark would be measured otherwise.
            e2e::replace_driver(session, &self.cluster).await
        };
        let reset = reset.await;
        match reset {
            Ok(()) => {
                step.done("");
                Ok(Some(self))
            }
            Err(error) => {
                step.failed(format!("{error:#}; another cluster is started"));
                self.cluster.stop().await?;
                Ok(None)
            }
        }
    }

    /// Deletes the pods and claims of [`NAMESPACE`], and waits until their volumes are deleted.
    async fn delete_claims(&self, session: &Session) -> Result<()> {
        let env = TestEnv::in_namespace(session, &self.cluster, NAMESPACE)?;
        let (deletion, all) = (DeleteParams::default().grace_period(0), ListParams::default());
        env.pods().delete_collection(&deletion, &all).await.map_err(api_error).context("delete the pods")?;
        let claims = env.claims().delete_collection(&DeleteParams::default(), &all).await;
        claims.map_err(api_error).context("delete the claims")?;
        let volumes: Api<PersistentVolume> = Api::all(self.cluster.client().clone());
        until(volumes, watcher::Config::default(), RESET_TIMEOUT, |volumes| {
            State::ready_if(volumes.is_empty(), format!("{} volumes are left", volumes.len()))
        })
        .await
        .map(drop)
    }
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
        let filled = node.output(&["sh", "-c", script, "sh", directory, &files], timeout).await;
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
