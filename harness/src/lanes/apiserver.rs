//! The apiserver lane: the provisioner against a real etcd, API server, controller manager and scheduler, on volumes in memory.
//!
//! Nodes are objects that nobody answers for, so there is no virtual machine. What Kubernetes decides about a claim without a
//! kubelet is decided here in seconds; the provisioner has no rights but those of the manifests.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode};
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use super::libtest::Run;
use crate::cache;
use crate::cluster::api_error::told;
use crate::cluster::waiting::{State, until};
use crate::cluster::{ClusterSpec, ControlPlane, Durability, Purpose};
use crate::e2e::manifests::Manifests;
use crate::process::Program;
use crate::report::Report;
use crate::rust_build;
use crate::session::Session;

const SUITE: &str = "apiserver: provisioner";
const FEATURE: &str = "apiserver-tests";
/// The module that the feature adds.
const TESTS: &str = "live_tests::";

/// The nodes that the tests know.
const NODES: [&str; 2] = ["node-a", "node-b"];
/// Where the tests find who the provisioner of node N is: `N.kubeconfig`.
const KUBECONFIGS: &str = "PROVISIONER_KUBECONFIGS";

/// From the manifests to a pod of the driver that has its node.
const SCHEDULING_TIME: Duration = Duration::from_secs(120);
/// All tests; each awaits what it awaits for half a minute at most.
const TESTS_TIME: Duration = Duration::from_secs(900);

pub(super) async fn run(session: &Session, kubernetes_bin: Option<&Path>) -> Result<Report> {
    session.until_cancelled(prepare_and_run(session, kubernetes_bin)).await
}

async fn prepare_and_run(session: &Session, kubernetes_bin: Option<&Path>) -> Result<Report> {
    let manifests = Manifests::of_driver(session)?;
    let tests = rust_build::unit_tests(session, "provisioner", FEATURE).await?;
    let logs = session.workspace.reports("test").join("apiserver");
    // An earlier run's would be read as this one's.
    cache::remove_dir(&logs)?;
    let directory = tempfile::tempdir().context("make a directory")?;
    let spec = ClusterSpec {
        dir: directory.path().to_owned(),
        logs: logs.clone(),
        // It does not outlive the machine's power.
        durability: Durability::Unsafe,
        purpose: Purpose::Use,
    };
    let control_plane = ControlPlane::alone(session, &spec, kubernetes_bin).await?;
    let result = test(session, &control_plane, &manifests, &tests, &logs).await;
    // Also when that failed: the end of the logs is worth having.
    let stopped = control_plane.stop().await;
    let report = result?;
    stopped?;
    Ok(report)
}

async fn test(
    session: &Session,
    control_plane: &ControlPlane,
    manifests: &Manifests,
    tests: &Path,
    logs: &Path,
) -> Result<Report> {
    let step = session.progress.step("install the driver on nodes that are objects only");
    let kubeconfigs = install(control_plane, manifests).await?;
    step.done("");

    let step = session.progress.step("run the tests of the provisioner against the API server");
    let log = logs.join("tests.log");
    let program = Program::new(tests)
        .named("the provisioner's tests")
        // The nodes are the same for all tests, and each needs them to itself.
        .args(["--test-threads=1", TESTS])
        .env("KUBECONFIG", control_plane.kubeconfig())
        .env(KUBECONFIGS, kubeconfigs)
        .log(&log);
    let started = Instant::now();
    let ended = match tokio::time::timeout(TESTS_TIME, program.finish()).await {
        Ok(finished) => {
            let finished = finished?;
            if finished.status.success() { Ok(()) } else { Err(finished.failure()) }
        }
        Err(_elapsed) => Err(format!("not done within {TESTS_TIME:?}")),
    };
    let output = std::fs::read_to_string(&log).with_context(|| format!("read {}", log.display()))?;
    let mut report = Report::new();
    Run::parse(&output).report(&mut report, SUITE, ended, started.elapsed());
    if report.succeeded() {
        step.done(report.summary());
    } else {
        step.failed(report.summary());
    }
    Ok(report)
}

/// Makes the nodes, applies the manifests, and answers the directory with the kubeconfig of each node's provisioner.
async fn install(control_plane: &ControlPlane, manifests: &Manifests) -> Result<PathBuf> {
    let client = control_plane.client();
    let driver: CSIDriver = manifests.only("CSIDriver")?;
    for name in NODES {
        register(client, name, &driver.name_any()).await?;
    }
    manifests.apply(client).await?;
    let pods = until(Api::<Pod>::all(client.clone()), watcher::Config::default(), SCHEDULING_TIME, |pods| {
        let missing: Vec<_> =
            NODES.iter().filter(|node| !pods.values().any(|pod| node_of(pod) == Some(node))).collect();
        State::when(missing.is_empty(), format!("no pod of the driver on {missing:?}"))
    })
    .await?;
    let mut directory = None;
    for pod in pods.values() {
        let Some(node) = node_of(pod) else { continue };
        let path = control_plane.kubeconfig_of_pod(pod, node).await?;
        directory = path.parent().map(Path::to_owned);
    }
    directory.context("no kubeconfig was written")
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// What a kubelet would tell of itself, and of the driver once that has registered.
async fn register(client: &Client, name: &str, driver: &str) -> Result<()> {
    let topology = format!("topology.{driver}/node");
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {
            "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", &topology: name,
        }},
    }))?;
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &node).await.map_err(told).context("create a Node")?;
    let status = json!({"status": {
        "capacity": {"cpu": "8", "memory": "8Gi", "pods": "110"},
        "allocatable": {"cpu": "8", "memory": "8Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Declared", "message": ""}],
    }});
    nodes
        .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
        .await
        .map_err(told)
        .context("write the status of a Node")?;
    let csi: CSINode = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"drivers": [{"name": driver, "nodeID": name, "topologyKeys": [topology]}]},
    }))?;
    let csi_nodes: Api<CSINode> = Api::all(client.clone());
    csi_nodes.create(&PostParams::default(), &csi).await.map_err(told).context("create a CSINode")?;
    Ok(())
}
