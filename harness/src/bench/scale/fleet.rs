//! The part `fleet`: the provisioners of many nodes beside one API server.
//!
//! Each node gets some claims. The rows say what a claim costs the API server, and how many bytes all provisioners receive for it, by
//! the number of nodes. kube-controller-manager binds the claims. The bench selects their nodes as the scheduler would.
//!
//! The claims go round the nodes, so that no two claims of a node follow each other. Each number of nodes has a control plane of its own,
//! which stores nothing of an earlier one. The bench writes the claims as an administrator, whose requests the API server does not queue.
//! Those of the provisioners share the seats of the priority level `workload-low`, because all have one account.

use std::collections::BTreeSet;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ControlPlane, KubernetesMinor};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::super::args::Args;
use super::super::cluster::NAMESPACE;
use super::super::counting_proxy::CountingProxy;
use super::super::measurement::{Environment, Samples, milliseconds};
use super::super::metrics;
use super::super::process::{self, MeasuredProcess};
use super::super::threshold::{Requirement, grows_at_most};
use super::claims::{self, CREATE_CONCURRENCY, Claims, create_for_node};
use crate::fake_nodes::{self, LiveTests};
use crate::test_env::claims::is_bound;
use crate::test_env::workload::create_namespace;

const EGRESS: &str = "fleet_egress_bytes_per_claim";

const PROFILE: ClusterProfile = ClusterProfile::Benchmark;
/// The timeout of the start of all provisioners.
const START_TIMEOUT: Duration = Duration::from_secs(1800);
/// The timeout from one bound claim to the next.
const BIND_TIMEOUT: Duration = Duration::from_secs(120);
/// The number of names in the error about claims that are not bound.
const NAMED_CLAIMS: usize = 10;

/// Measures one node and many nodes on a control plane each, with the logs in directories below `logs`.
pub(super) async fn run(session: &Session, args: &Args, logs: &Path) -> Result<Environment> {
    let tests = fake_nodes::build_live_tests(session, PROFILE).await?;
    let kubernetes = KubernetesMinor::default();
    let mut samples = Samples::default();
    for (nodes, claims_per_node) in args.size([(1, 500), (1000, 10)], [(1, 50), (50, 5)]) {
        let logs = logs.join(format!("fleet-{nodes}"));
        let nodes: Vec<String> = (1..=nodes).map(|number| format!("node-{number}")).collect();
        let fleet = Fleet { nodes: &nodes, claims_per_node, logs: &logs };
        let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
            Box::pin(fleet.measure(session, control_plane, &tests, kubeconfigs, &mut samples)).await
        };
        fake_nodes::with_driver(session, &nodes, PROFILE, kubernetes, &logs, measure)
            .await
            .with_context(|| format!("fleet of {} nodes", nodes.len()))?;
    }
    let place = "this machine, the provisioners of all nodes in one process, volumes in memory";
    process::environment(place, kubernetes, samples)
}

pub(super) fn requirements() -> Vec<Requirement> {
    let text =
        "bytes that the provisioners of {n} nodes receive for a claim: at most 2 times those with one node";
    vec![grows_at_most(text, EGRESS, 2.0)]
}

/// Nodes, and the number of claims that each of them gets.
struct Fleet<'a> {
    nodes: &'a [String],
    claims_per_node: u64,
    logs: &'a Path,
}

impl Fleet<'_> {
    async fn measure(
        &self,
        session: &Session,
        control_plane: &ControlPlane,
        tests: &Path,
        kubeconfigs: &Path,
        samples: &mut Samples,
    ) -> Result<()> {
        let client = control_plane.client();
        let step = session.progress.step("install the component claim-labels");
        create_namespace(client, NAMESPACE).await?;
        claims::install_labels(session, client).await?;
        Claims::new(client, "a-node").until_labelled().await?;
        step.done("");

        let (nodes, logs) = (self.nodes.len() as u64, self.logs);
        let step = session.progress.step(format!("start the provisioners of {nodes} nodes"));
        let mut process = self.start(tests, control_plane, kubeconfigs).await?;
        step.done("");

        let claims = self.names_and_nodes().count();
        let step = session.progress.step(format!("bind {claims} claims of {nodes} nodes"));
        let before = api_server_time(client, &logs.join("api-server-before.metrics")).await?;
        let received_before = process.received();
        let time = process.during(Box::pin(self.create_and_bind(client, &step))).await?;
        let received = process.received() - received_before;
        let after = api_server_time(client, &logs.join("api-server-after.metrics")).await?;
        process.stop(process::STOP_GRACE).await?;
        let count = claims as f64;
        samples.add("fleet_claims_per_second", nodes, "claims/s", count / time.as_secs_f64());
        samples.add("fleet_api_server_cpu_ms_per_claim", nodes, "ms", milliseconds(after - before) / count);
        samples.add(EGRESS, nodes, "B", received as f64 / count);
        step.done(format!("{:.0} claims/s", count / time.as_secs_f64()));
        Ok(())
    }

    /// Starts the provisioners of all nodes by `tests`, the program with the live tests, and waits until all are ready. Their connections
    /// to the API server go through one proxy.
    async fn start(
        &self,
        tests: &Path,
        control_plane: &ControlPlane,
        kubeconfigs: &Path,
    ) -> Result<MeasuredProcess> {
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let proxy = redirect_all(kubeconfigs, self.nodes, directory.path()).await?;
        let ready = Arc::new(Notify::new());
        let on_line = {
            let ready = Arc::clone(&ready);
            move |line: &str| {
                if line == fake_nodes::FLEET_READY {
                    ready.notify_one();
                }
            }
        };
        let log = self.logs.join("provisioners.log");
        let process = LiveTests::new(tests.to_owned(), control_plane, directory.path())
            .serving(fake_nodes::SERVE_FLEET)
            .log(&log)
            .on_stderr_line(on_line)
            .spawn()?;

        let mut process =
            MeasuredProcess { process, controller: None, proxy: Some(proxy), _directory: Some(directory) };
        let started = process.during(async {
            let started = timeout(START_TIMEOUT, ready.notified()).await;
            started.with_context(|| format!("the provisioners are not ready after {START_TIMEOUT:?}"))
        });
        started.await.with_context(|| format!("see {}", log.display()))?;
        Ok(process)
    }

    /// Creates the claims, and returns the time from the first request until all are bound.
    async fn create_and_bind(&self, client: &Client, step: &Step) -> Result<Duration> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);
        let started = Instant::now();
        let creating = futures::stream::iter(self.names_and_nodes())
            .map(async |(name, node)| create_for_node(&api, &name, node).await)
            .buffer_unordered(CREATE_CONCURRENCY)
            .try_for_each(async |()| Ok(()));
        let unbound = self.names_and_nodes().map(|(name, _)| name).collect();
        let changes = watcher::watcher(api.clone(), watcher::Config::default()).default_backoff();
        tokio::try_join!(creating, until_bound(changes, unbound, step))?;
        Ok(started.elapsed())
    }

    /// Returns the claims in the order of their creation, which goes round the nodes.
    fn names_and_nodes(&self) -> impl Iterator<Item = (String, &str)> {
        (0..self.claims_per_node)
            .flat_map(|round| self.nodes.iter().map(move |node| (format!("{node}-{round}"), node.as_str())))
    }
}

/// Waits until all claims in `unbound` are bound. Fails if none of them becomes bound in [`BIND_TIMEOUT`].
async fn until_bound(
    changes: impl Stream<Item = watcher::Result<watcher::Event<PersistentVolumeClaim>>>,
    mut unbound: BTreeSet<String>,
    step: &Step,
) -> Result<()> {
    let (mut changes, count) = (pin!(changes), unbound.len());
    let mut last_error = None;
    while !unbound.is_empty() {
        let next_bound = async {
            loop {
                match changes.next().await {
                    Some(Ok(watcher::Event::Apply(claim) | watcher::Event::InitApply(claim)))
                        if is_bound(&claim) && unbound.contains(&claim.name_any()) =>
                    {
                        return Some(claim.name_any());
                    }
                    Some(Ok(_)) => {}
                    // The watcher retries.
                    Some(Err(error)) => last_error = Some(error),
                    None => return None,
                }
            }
        };
        let Ok(Some(name)) = timeout(BIND_TIMEOUT, next_bound).await else {
            let names: Vec<&str> = unbound.iter().take(NAMED_CLAIMS).map(String::as_str).collect();
            bail!(
                "{} of {count} claims are not bound, and none was bound in {BIND_TIMEOUT:?}; some of them are {}; \
                 the last error of the watch is {last_error:?}",
                unbound.len(),
                names.join(", ")
            );
        };
        unbound.remove(&name);
        step.note(format!("{} of {count} claims are bound", count - unbound.len()));
    }
    Ok(())
}

/// Returns the processor time of the API server since its start. Saves its metrics, from which a user sees the kinds of requests.
async fn api_server_time(client: &Client, copy: &Path) -> Result<Duration> {
    let metrics = metrics::of_api_server(client).await?;
    std::fs::write(copy, &metrics).with_context(|| format!("write {}", copy.display()))?;
    metrics::processor_time(&metrics)
}

/// Starts a proxy of the API server, and writes kubeconfigs that name the proxy to the directory `to`.
async fn redirect_all(kubeconfigs: &Path, nodes: &[String], to: &Path) -> Result<CountingProxy> {
    let read = |node: &str| {
        let path = fake_nodes::kubeconfig(kubeconfigs, node);
        std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    };
    let first = nodes.first().context("there is no node")?;
    let proxy = CountingProxy::of_kubeconfig(&read(first)?).await?;
    for node in nodes {
        let path = fake_nodes::kubeconfig(to, node);
        std::fs::write(&path, proxy.redirect(&read(node)?)?)
            .with_context(|| format!("write {}", path.display()))?;
    }
    Ok(proxy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_kubeconfigs_name_one_proxy() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let nodes = ["node-1", "node-2"].map(str::to_owned);
        let text = r#"{"clusters":[{"cluster":{"server":"https://127.0.0.1:9"}}]}"#;
        for node in &nodes {
            std::fs::write(fake_nodes::kubeconfig(from.path(), node), text).unwrap();
        }
        let proxy = redirect_all(from.path(), &nodes, to.path()).await.unwrap();
        for node in &nodes {
            let redirected = std::fs::read_to_string(fake_nodes::kubeconfig(to.path(), node)).unwrap();
            assert_eq!(redirected, proxy.redirect(text).unwrap());
        }
        let error = redirect_all(from.path(), &["node-3".to_owned()], to.path()).await.unwrap_err();
        assert!(error.to_string().contains("node-3.kubeconfig"), "{error}");
    }
}
