//! The peer of the driver: external-provisioner and external-resizer, which do the provisioner's work. They run on a node, beside a CSI
//! controller that creates the same volumes as the driver; or on this machine, beside one whose volumes are in memory.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, Client};
use serde_json::json;
use testvm::go_build::{self, GoModule, required_version};
use testvm::process::Program;
use testvm::rust_build;
use testvm::session::Session;
use testvm_cluster::{Cluster, ControlPlane, Node, Subject, objects};

use super::counting_proxy::CountingProxy;
use super::node_process::NodeProcess;
use super::process::{MeasuredProcess, NODE};
use crate::builds::{self, ProgramProfile};
use crate::nodes::DATA_DIR;

const SIDECARS: GoModule = GoModule::new("csi-sidecars", "github.com/kubernetes-csi/external-provisioner/v5");
/// The module of external-resizer.
const RESIZER_MODULE: &str = "github.com/kubernetes-csi/external-resizer";
/// The file that pins the versions of the sidecars.
const GO_MOD: &str = include_str!("../../../vm-images/csi-sidecars/go.mod");

/// The names of the peer's programs in the node's directory of tools.
pub(super) const PROVISIONER: &str = "csi-provisioner";
pub(super) const RESIZER: &str = "csi-resizer";
pub(super) const DRIVER: &str = "loopfs-csi";

pub(super) const DRIVER_NAME: &str = "peer.loopfs.dev";
pub(super) const CLASS: &str = "peer";
/// The peer's user name at the API server, and its group: those of a service account, as the driver has one. The API server limits the
/// concurrent requests of service accounts, and not those of an administrator.
pub(super) const USER: &str = "system:serviceaccount:kube-system:sidecars";
pub(super) const SUBJECT: Subject<'static> = Subject { user: USER, group: Some("system:serviceaccounts") };
/// The peer's own directory on the node, and the names of the files in it.
const DIR: &str = "/run/peer";
const SOCKET: &str = "csi.sock";
const KUBECONFIG: &str = "kubeconfig";

/// The programs have no work that must be completed.
pub(super) const STOP_GRACE: Duration = Duration::from_secs(10);

/// The rate limit of each sidecar's requests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Limits {
    /// Five requests a second, in bursts of ten.
    Default,
    /// More requests than a sidecar ever sends.
    Lifted,
}

/// Returns the names and versions of the sidecars.
pub(super) fn sidecars() -> String {
    format!("{} and external-resizer {}", provisioner(), pinned(RESIZER_MODULE))
}

/// Returns the name and version of external-provisioner.
pub(super) fn provisioner() -> String {
    format!("external-provisioner {}", pinned(SIDECARS.versioned_by))
}

/// Returns the minor release of a module, such as `5.3`.
fn pinned(module: &str) -> String {
    required_version(GO_MOD, module)
        .map_or_else(|| "unknown".to_owned(), |version| format!("{}.{}", version.major, version.minor))
}

/// Builds the peer's programs of a node or takes them from the cache, and returns the name and path of each.
pub(super) async fn tools(session: &Session) -> Result<Vec<(String, PathBuf)>> {
    let directory = go_build::build(session, &SIDECARS).await?;
    let sidecars = [PROVISIONER, RESIZER].map(|name| (name.to_owned(), directory.join(name)));
    let driver = builds::driver_programs(session, ProgramProfile::Release).await?.csi;
    Ok(sidecars.into_iter().chain([(DRIVER.to_owned(), driver)]).collect())
}

/// The peer on a node, with its running CSI controller.
pub(super) struct NodePeer<'a>(&'a Node);

/// The running sidecars of a node.
pub(super) struct NodeSidecars<'a>([NodeProcess<'a>; 2]);

impl<'a> NodePeer<'a> {
    /// Creates the peer's objects and starts its CSI controller.
    pub(super) async fn install(cluster: &'a Cluster, node: &'a Node) -> Result<NodePeer<'a>> {
        create_objects(cluster.client()).await?;
        let control_plane = cluster.control_plane();
        let caller = control_plane.authority().client(SUBJECT)?;
        let kubeconfig = control_plane.guest_kubeconfig(&caller)?;
        let write = format!("umask 077 && mkdir -p {DIR} && printf %s \"$1\" > {DIR}/{KUBECONFIG}");
        node.output(&["sh", "-c", &write, "sh", &kubeconfig]).await?;
        let args = [
            format!("--driver-name={DRIVER_NAME}"),
            format!("--node-name={}", node.name()),
            format!("--data-dir={DATA_DIR}"),
            format!("--endpoint=unix://{DIR}/{SOCKET}"),
        ];
        NodeProcess::start(node, DIR, DRIVER, &args).await?;
        Ok(NodePeer(node))
    }

    /// Starts the sidecars as they are deployed beside the driver of a node.
    pub(super) async fn start(&self, limits: Limits) -> Result<NodeSidecars<'a>> {
        let start = async |name| NodeProcess::start(self.0, DIR, name, &args(name, DIR, limits)).await;
        Ok(NodeSidecars([start(PROVISIONER).await?, start(RESIZER).await?]))
    }

    /// Copies the logs of its processes to `directory`, for the user.
    pub(super) async fn save_logs(&self, directory: &Path) -> Result<()> {
        for name in [PROVISIONER, RESIZER, DRIVER] {
            let log = self.0.exec(&["cat", &format!("{DIR}/{name}.log")]).await?;
            let path = directory.join(format!("peer-{name}.log"));
            std::fs::write(&path, log.stdout).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }
}

impl NodeSidecars<'_> {
    /// Kills the sidecars, because they have no work that must be completed.
    pub(super) async fn stop(self) -> Result<()> {
        for sidecar in self.0 {
            sidecar.stop("KILL").await?;
        }
        Ok(())
    }
}

/// Builds a CSI controller whose volumes are in memory. It serves until SIGTERM. For our provisioner, it is a driver without storage.
pub(super) async fn memory_controller(session: &Session) -> Result<PathBuf> {
    rust_build::bench(session, "csi", "memory_controller").await
}

/// The programs of the peer on this machine.
pub(super) struct HostPeer {
    sidecars: PathBuf,
    /// See [`memory_controller`].
    controller: PathBuf,
}

/// A sidecar of this machine and its options.
#[derive(Clone, Copy)]
pub(super) struct HostSidecar<'a> {
    pub(super) name: &'static str,
    pub(super) caller: Subject<'a>,
    /// The name that its CSI controller has.
    pub(super) driver: &'a str,
    pub(super) limits: Limits,
    /// The last option.
    pub(super) option: &'a str,
    /// `true` if a proxy counts the bytes that it receives from the API server.
    pub(super) is_proxied: bool,
}

impl HostPeer {
    /// Builds the programs or takes them from the cache.
    pub(super) async fn build(session: &Session) -> Result<HostPeer> {
        let sidecars = go_build::build(session, &SIDECARS).await?;
        Ok(HostPeer { sidecars, controller: memory_controller(session).await? })
    }

    /// Starts a CSI controller and the sidecar, which waits for the socket of the controller. `log` is that of the sidecar.
    pub(super) async fn start(
        &self,
        control_plane: &ControlPlane,
        sidecar: HostSidecar<'_>,
        log: &Path,
    ) -> Result<MeasuredProcess> {
        let HostSidecar { name, caller, driver, limits, option, is_proxied } = sidecar;
        // Only the owner can enter the directory.
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let text = directory.path().to_str().context("the temporary directory has no text as its path")?;
        let controller =
            Program::new(&self.controller).arg(directory.path().join(SOCKET)).args([driver, NODE]);
        let controller = controller.log(log.with_extension("controller.log")).spawn()?;

        let caller = control_plane.authority().client(caller)?;
        let mut kubeconfig = control_plane.host_kubeconfig(&caller);
        let mut proxy = None;
        if is_proxied {
            let counting = CountingProxy::of_kubeconfig(&kubeconfig).await?;
            kubeconfig = counting.redirect(&kubeconfig)?;
            proxy = Some(counting);
        }
        let path = directory.path().join(KUBECONFIG);
        std::fs::write(&path, kubeconfig).with_context(|| format!("write {}", path.display()))?;
        let program = Program::new(self.sidecars.join(name)).args(args(name, text, limits)).arg(option);
        let process = program.env("NODE_NAME", NODE).log(log).spawn()?;
        Ok(MeasuredProcess { process, controller: Some(controller), proxy, _directory: Some(directory) })
    }
}

/// Creates the peer's StorageClass, and grants it all rights.
pub(super) async fn create_objects(client: &Client) -> Result<()> {
    let class: StorageClass = serde_json::from_value(json!({
        "metadata": {"name": CLASS}, "provisioner": DRIVER_NAME, "volumeBindingMode": "WaitForFirstConsumer",
    }))?;
    objects::create(&Api::all(client.clone()), &class).await?;
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": "bench-sidecars"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}],
    }))?;
    objects::create(&Api::all(client.clone()), &binding).await.map(drop)
}

/// Returns the arguments of a sidecar. Its kubeconfig and the socket of its CSI controller are in `directory`.
fn args(name: &str, directory: &str, limits: Limits) -> Vec<String> {
    let of_provisioner: &[&str] = &[
        "--node-deployment",
        "--feature-gates=Topology=true",
        "--strict-topology",
        "--immediate-topology=false",
    ];
    let of_all =
        [format!("--csi-address={directory}/{SOCKET}"), format!("--kubeconfig={directory}/{KUBECONFIG}")];
    let lifted: &[&str] = &["--kube-api-qps=10000", "--kube-api-burst=10000"];
    let own = if name == PROVISIONER { of_provisioner } else { &[] };
    let limits = if limits == Limits::Lifted { lifted } else { &[] };
    let text = |args: &[&str]| args.iter().map(|&arg| arg.to_owned()).collect::<Vec<_>>();
    [text(own), of_all.to_vec(), text(limits)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_limits_differ() {
        for name in [PROVISIONER, RESIZER] {
            let (usual, lifted) = (args(name, DIR, Limits::Default), args(name, DIR, Limits::Lifted));
            assert!(lifted.starts_with(&usual) && lifted.len() == usual.len() + 2);
            assert!(lifted[usual.len()..].iter().all(|arg| arg.starts_with("--kube-api-")));
            assert_eq!(usual.contains(&"--node-deployment".to_owned()), name == PROVISIONER);
            assert!(usual.contains(&format!("--kubeconfig={DIR}/{KUBECONFIG}")));
        }
    }
}
