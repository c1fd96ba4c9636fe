//! Fake nodes: Node objects without a kubelet or a virtual machine, on which the driver is installed. What
//! Kubernetes does without a kubelet takes seconds there.
//!
//! The provisioner's live tests use these nodes. On each, they have only the rights of the manifests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode};
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use testvm::cache;
use testvm::process::Program;
use testvm::rust_build;
use testvm::session::Session;
use testvm_cluster::api_error::api_error;
use testvm_cluster::waiting::{State, until};
use testvm_cluster::workload::node_of;
use testvm_cluster::{ClusterProfile, ClusterSpec, ControlPlane, Durability, KubernetesMinor, objects};

use crate::test_env::manifests::{self, Manifests};

/// The package of the live tests, and the feature that enables them.
const PACKAGE: &str = "provisioner";
const FEATURE: &str = "apiserver-tests";

/// The nodes that the tests use, and each benchmark that needs no others.
pub(crate) const NODES: [&str; 2] = ["node-a", "node-b"];
/// The variable with the directory of the kubeconfigs: `N.kubeconfig` of the provisioner of node N, and `controller-N.kubeconfig` if a
/// replica of the controller is on node N.
const KUBECONFIGS: &str = "PROVISIONER_KUBECONFIGS";

/// The namespace of the driver.
pub(crate) const SYSTEM: &str = "loopfs-system";

/// The label with the name of a pod's program.
const APP: &str = "app.kubernetes.io/name";
const DAEMON_SET_APP: &str = "loopfs";
const CONTROLLER_APP: &str = "loopfs-controller";

/// The timeout from the application of the manifests until a pod of the driver is scheduled.
const SCHEDULING_TIMEOUT: Duration = Duration::from_secs(120);
/// The time that is added for each node. kube-scheduler limits itself to 50 requests a second, and sends several for a pod.
const POD_SCHEDULING_TIMEOUT: Duration = Duration::from_millis(500);
/// The number of nodes that are declared, and of tokens that are requested, concurrently.
const INSTALL_CONCURRENCY: usize = 32;

/// The module of all live tests.
pub(crate) const ALL: &str = "live_tests::";
/// The module that has no tests, but provisioners with their volumes in memory. They serve until SIGTERM.
pub(crate) const SERVING: &str = "live_tests::serving::";
/// The provisioner of the first node.
pub(crate) const SERVE: &str = "live_tests::serving::until_sigterm";
/// The provisioners of all nodes that have kubeconfigs, with the component claim-labels.
pub(crate) const SERVE_FLEET: &str = "live_tests::serving::fleet_until_sigterm";
/// The variable of [`SERVE`] with the seconds after which the provisioner gives up a watch that delivers nothing.
pub(crate) const WATCH_SILENCE: &str = "PROVISIONER_WATCH_SILENCE";
/// The line on the standard error of [`SERVE_FLEET`] after all provisioners are ready.
pub(crate) const FLEET_READY: &str = "all provisioners are ready";

/// The program of the live tests, and the kubeconfigs in its environment.
pub(crate) struct LiveTests {
    path: PathBuf,
    kubeconfig: PathBuf,
    kubeconfigs: PathBuf,
}

impl LiveTests {
    /// Returns the tests for a control plane. `kubeconfigs` is the directory of its kubeconfigs.
    pub(crate) fn new(path: PathBuf, control_plane: &ControlPlane, kubeconfigs: &Path) -> LiveTests {
        LiveTests { path, kubeconfig: control_plane.kubeconfig(), kubeconfigs: kubeconfigs.to_owned() }
    }

    /// Returns the program with its environment.
    pub(crate) fn program(&self) -> Program {
        Program::new(&self.path)
            .named("the provisioner's tests")
            .env("KUBECONFIG", &self.kubeconfig)
            .env(KUBECONFIGS, &self.kubeconfigs)
    }

    /// Returns the program that runs a test of [`SERVING`], with its environment.
    pub(crate) fn serving(&self, name: &str) -> Program {
        self.program().args([name, "--exact", "--ignored", "--nocapture"])
    }
}

/// Returns the volumes that a program of [`SERVING`] for one node names in its log when it stops.
pub(crate) fn stored_volumes(log: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(log).with_context(|| format!("read {}", log.display()))?;
    Ok(text.lines().filter_map(|line| line.strip_prefix("volume ")).map(str::to_owned).collect())
}

/// Starts a control plane that logs to `logs`, creates [`NODES`] and installs the driver on them. Then calls `run` with the live tests
/// that [`build_live_tests`] returned, and stops the control plane.
pub(crate) async fn with_live_tests<T>(
    session: &Session,
    program: &Path,
    profile: ClusterProfile,
    kubernetes: KubernetesMinor,
    logs: &Path,
    run: impl AsyncFnOnce(&LiveTests, &ControlPlane) -> Result<T>,
) -> Result<T> {
    let run = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        run(&LiveTests::new(program.to_owned(), control_plane, kubeconfigs), control_plane).await
    };
    with_driver(session, &NODES.map(str::to_owned), profile, kubernetes, logs, run).await
}

/// Builds the provisioner's live tests, and returns the path of the program.
pub(crate) async fn build_live_tests(session: &Session, profile: ClusterProfile) -> Result<PathBuf> {
    let profile = match profile {
        ClusterProfile::Default | ClusterProfile::Conformance => "test",
        ClusterProfile::Benchmark => "release",
    };
    rust_build::unit_tests(session, PACKAGE, FEATURE, profile).await
}

/// Starts a control plane that logs to `logs`, creates `nodes` and installs the driver on them. Then calls `run` with the
/// directory of the kubeconfigs, and stops the control plane. [`kubeconfig`] returns the path of one of them.
pub(crate) async fn with_driver<T>(
    session: &Session,
    nodes: &[String],
    profile: ClusterProfile,
    kubernetes: KubernetesMinor,
    logs: &Path,
    run: impl AsyncFnOnce(&ControlPlane, &Path) -> Result<T>,
) -> Result<T> {
    let manifests = manifests::of_driver(session)?;
    // The logs of an earlier run must not be read as those of this run.
    cache::remove_dir(logs)?;
    let directory = tempfile::tempdir().context("make a directory")?;
    let spec = ClusterSpec {
        dir: directory.path().to_owned(),
        logs: logs.to_owned(),
        // The control plane need not survive a power cut of the machine.
        durability: Durability::Unsafe,
        profile,
    };
    let control_plane = ControlPlane::alone(session, &spec, kubernetes).await?;
    let ran = async {
        let step = session.progress.step("install the driver on fake nodes");
        let kubeconfigs = install(&control_plane, nodes, &manifests).await?;
        step.done("");
        run(&control_plane, &kubeconfigs).await
    };
    let ran = ran.await;
    // Also after a failure the control plane is stopped in order, so that its logs are complete.
    let stopped = control_plane.stop().await;
    let ran = ran?;
    stopped?;
    Ok(ran)
}

/// Creates the nodes, applies the manifests, and returns the directory with the kubeconfigs of each node's
/// provisioner and of the controller.
async fn install(control_plane: &ControlPlane, nodes: &[String], manifests: &Manifests) -> Result<PathBuf> {
    let client = control_plane.client();
    let driver = manifests.only::<CSIDriver>("CSIDriver")?.name_any();
    futures::stream::iter(nodes)
        .map(|name| register(client, name, &driver))
        .buffer_unordered(INSTALL_CONCURRENCY)
        .try_for_each(async |()| Ok(()))
        .await?;
    manifests.apply(client).await?;
    let timeout = nodes.iter().fold(SCHEDULING_TIMEOUT, |timeout, _| timeout + POD_SCHEDULING_TIMEOUT);
    let pods = until(Api::<Pod>::all(client.clone()), watcher::Config::default(), timeout, |pods| {
        let scheduled = |app| pods.values().filter(move |pod| app_of(pod) == Some(app)).filter_map(node_of);
        let have_driver: BTreeSet<&str> = scheduled(DAEMON_SET_APP).collect();
        let missing: Vec<_> = nodes.iter().filter(|node| !have_driver.contains(node.as_str())).collect();
        if let Some(first) = missing.first() {
            return State::Pending(format!(
                "no pod of the driver on {} nodes, such as {first}",
                missing.len()
            ));
        }
        State::ready_if(scheduled(CONTROLLER_APP).next().is_some(), "no pod of the controller on a node")
    })
    .await?;
    let kubeconfigs = pods.values().filter_map(|pod| {
        let node = node_of(pod)?;
        let name = match app_of(pod)? {
            DAEMON_SET_APP => node.to_owned(),
            CONTROLLER_APP => name_of_controller(node),
            _ => return None,
        };
        Some(async move { control_plane.kubeconfig_of_pod(pod, &name).await })
    });
    let mut written = futures::stream::iter(kubeconfigs).buffer_unordered(INSTALL_CONCURRENCY);
    let mut directory = None;
    while let Some(path) = written.try_next().await? {
        directory = path.parent().map(Path::to_owned);
    }
    directory.context("no kubeconfig was written")
}

/// Returns the path of the kubeconfig of a node's provisioner, in the directory of the kubeconfigs.
pub(crate) fn kubeconfig(kubeconfigs: &Path, node: &str) -> PathBuf {
    kubeconfigs.join(format!("{node}.kubeconfig"))
}

/// Returns a node with a replica of the controller, and the path of the kubeconfig of that replica, in the directory of the
/// kubeconfigs.
pub(crate) fn kubeconfig_of_controller(kubeconfigs: &Path) -> Result<(&'static str, PathBuf)> {
    let of_replicas = NODES.map(|node| (node, kubeconfig(kubeconfigs, &name_of_controller(node))));
    let found = of_replicas.into_iter().find(|(_, path)| path.exists());
    found.with_context(|| format!("{} has no kubeconfig of the controller", kubeconfigs.display()))
}

/// Returns the driver's pod on a node.
pub(crate) async fn pod_of_driver(client: &Client, node: &str) -> Result<Pod> {
    pod_of(client, DAEMON_SET_APP, node).await
}

/// Returns the pod of the controller on a node.
pub(crate) async fn pod_of_controller(client: &Client, node: &str) -> Result<Pod> {
    pod_of(client, CONTROLLER_APP, node).await
}

async fn pod_of(client: &Client, app: &str, node: &str) -> Result<Pod> {
    let pods: Api<Pod> = Api::all(client.clone());
    let pods = objects::list(&pods, &format!("{APP}={app}")).await?;
    let on_node = pods.into_iter().find(|pod| node_of(pod) == Some(node));
    on_node.with_context(|| format!("no pod of {app} is on {node}"))
}

/// Returns the name of the kubeconfig of the controller's replica on a node.
fn name_of_controller(node: &str) -> String {
    format!("controller-{node}")
}

fn app_of(pod: &Pod) -> Option<&str> {
    pod.labels().get(APP).map(String::as_str)
}

/// Writes what a kubelet would report about its node, and about the driver after its registration.
pub(crate) async fn register(client: &Client, name: &str, driver: &str) -> Result<()> {
    let topology = format!("topology.{driver}/node");
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {
            "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", &topology: name,
        }},
    }))?;
    let nodes: Api<Node> = Api::all(client.clone());
    objects::create(&nodes, &node).await?;
    let status = json!({"status": {
        "capacity": {"cpu": "8", "memory": "8Gi", "pods": "110"},
        "allocatable": {"cpu": "8", "memory": "8Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Declared", "message": ""}],
    }});
    nodes
        .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
        .await
        .map_err(api_error)
        .context("write the status of a Node")?;
    let csi: CSINode = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"drivers": [{"name": driver, "nodeID": name, "topologyKeys": [topology]}]},
    }))?;
    let csi_nodes: Api<CSINode> = Api::all(client.clone());
    objects::create(&csi_nodes, &csi).await?;
    Ok(())
}
