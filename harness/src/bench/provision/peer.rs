//! The sidecars that do the provisioner's work, on the node, beside a CSI controller that creates the same
//! volumes as the driver.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use testvm::go_build::{self, GoModule, required_version};
use testvm::session::Session;
use testvm_cluster::api_error::api_error;
use testvm_cluster::{Cluster, ControlPlane, Identity, Node, Subject};

use super::super::node_process::NodeProcess;
use super::contender::Contender;
use crate::builds::{self, ProgramProfile};
use crate::nodes::DATA_DIR;

const SIDECARS: GoModule = GoModule {
    name: "csi-sidecars",
    versioned_by: "github.com/kubernetes-csi/external-provisioner/v5",
    version_variables: &[],
    renamed: &[],
    without_go: None,
    overlay: None,
};

/// The names of the peer's programs in the node's directory of tools.
pub(in crate::bench) const PROVISIONER: &str = "csi-provisioner";
pub(in crate::bench) const RESIZER: &str = "csi-resizer";
pub(in crate::bench) const DRIVER: &str = "loopfs-csi";

/// The module of external-resizer.
const RESIZER_MODULE: &str = "github.com/kubernetes-csi/external-resizer";
/// The file that pins the versions of the sidecars.
const GO_MOD: &str = include_str!("../../../../vm-images/csi-sidecars/go.mod");

/// Returns the names and versions of the sidecars, and the driver that they call.
pub(in crate::bench) fn description() -> String {
    format!("{} with the CSI controller of loopfs-csi", sidecars())
}

/// Returns the names and versions of the sidecars.
pub(in crate::bench) fn sidecars() -> String {
    format!("{} and external-resizer {}", provisioner(), pinned(RESIZER_MODULE))
}

/// Returns the name and version of external-provisioner.
pub(in crate::bench) fn provisioner() -> String {
    format!("external-provisioner {}", pinned(SIDECARS.versioned_by))
}

/// Returns the minor release of a module, such as `5.3`.
fn pinned(module: &str) -> String {
    required_version(GO_MOD, module)
        .map_or_else(|| "unknown".to_owned(), |version| format!("{}.{}", version.major, version.minor))
}

/// The paths of the programs on the node.
const PROGRAMS: [&str; 3] =
    ["/opt/kubernetes/csi-provisioner", "/opt/kubernetes/csi-resizer", "/opt/kubernetes/loopfs-csi"];
pub(in crate::bench) const DRIVER_NAME: &str = "peer.loopfs.dev";
pub(in crate::bench) const CLASS: &str = "peer";
/// The peer's user name at the API server, and its group: those of a service account, as the driver has one. The API server limits the
/// concurrent requests of service accounts, and not those of an administrator.
pub(in crate::bench) const USER: &str = "system:serviceaccount:kube-system:sidecars";
const GROUP: &str = "system:serviceaccounts";
/// The name of the binding that gives the peer its rights.
const BINDING: &str = "bench-sidecars";
/// The peer's own directory on the node.
pub(in crate::bench) const DIR: &str = "/run/peer";
/// The names of the files in the peer's directory.
pub(in crate::bench) const SOCKET: &str = "csi.sock";
pub(in crate::bench) const KUBECONFIG: &str = "kubeconfig";

/// The timeout of a command on an emulated processor.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// The rate limit of each sidecar's requests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::bench) enum Limits {
    /// Five requests a second, in bursts of ten.
    Default,
    /// More requests than a sidecar ever sends.
    Lifted,
}

/// The peer with its running CSI controller.
pub(in crate::bench) struct Peer<'a> {
    client: &'a Client,
    node: &'a Node,
    driver: NodeProcess<'a>,
}

/// The running sidecars.
pub(in crate::bench) struct Sidecars<'a>([NodeProcess<'a>; 2]);

/// Builds the sidecars or takes them from the cache, and returns their directory.
pub(in crate::bench) async fn build_sidecars(session: &Session) -> Result<PathBuf> {
    go_build::build(session, &SIDECARS).await
}

/// Builds the peer's programs or takes them from the cache, and returns the name and path of each.
pub(in crate::bench) async fn tools(session: &Session) -> Result<Vec<(String, PathBuf)>> {
    let directory = build_sidecars(session).await?;
    let sidecars = [PROVISIONER, RESIZER].map(|name| (name.to_owned(), directory.join(name)));
    let driver = builds::driver_programs(session, ProgramProfile::Release).await?.csi;
    Ok(sidecars.into_iter().chain([(DRIVER.to_owned(), driver)]).collect())
}

impl<'a> Peer<'a> {
    /// Creates the peer's objects and starts its CSI controller.
    pub(in crate::bench) async fn install(cluster: &'a Cluster, node: &'a Node) -> Result<Peer<'a>> {
        let client = cluster.client();
        create_objects(client).await?;
        let control_plane = cluster.control_plane();
        let kubeconfig = control_plane.guest_kubeconfig(&caller(control_plane)?)?;
        let write = format!("umask 077 && mkdir -p {DIR} && printf %s \"$1\" > {DIR}/{KUBECONFIG}");
        node.output(&["sh", "-c", &write, "sh", &kubeconfig], COMMAND_TIMEOUT).await?;
        let driver = NodeProcess::start(node, DIR, DRIVER, &driver_args(node.name())).await?;
        Ok(Peer { client, node, driver })
    }

    pub(super) fn contender(&self) -> Contender<'static> {
        Contender { class: CLASS, user: USER, programs: &PROGRAMS }
    }

    /// Starts the sidecars as they are deployed beside the driver of a node.
    pub(in crate::bench) async fn start(&self, limits: Limits) -> Result<Sidecars<'a>> {
        let args = provisioner_args(DIR, limits);
        let provisioner = NodeProcess::start(self.node, DIR, PROVISIONER, &args).await?;
        let resizer = NodeProcess::start(self.node, DIR, RESIZER, &sidecar_args(DIR, limits)).await?;
        Ok(Sidecars([provisioner, resizer]))
    }

    /// Copies the logs of its processes to `directory`, for the user.
    pub(in crate::bench) async fn save_logs(&self, directory: &Path) -> Result<()> {
        for name in [PROVISIONER, RESIZER, DRIVER] {
            let log = self.node.exec(&["cat", &format!("{DIR}/{name}.log")], COMMAND_TIMEOUT).await?;
            let path = directory.join(format!("peer-{name}.log"));
            std::fs::write(&path, log.stdout).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }

    /// Stops its CSI controller and deletes its objects.
    pub(in crate::bench) async fn remove(self) -> Result<()> {
        self.driver.kill().await?;
        let classes: Api<StorageClass> = Api::all(self.client.clone());
        let deleted = classes.delete(CLASS, &DeleteParams::default()).await;
        deleted.map_err(api_error).with_context(|| format!("delete storage class {CLASS}"))?;
        let bindings: Api<ClusterRoleBinding> = Api::all(self.client.clone());
        let deleted = bindings.delete(BINDING, &DeleteParams::default()).await;
        deleted.map_err(api_error).with_context(|| format!("delete ClusterRoleBinding {BINDING}")).map(drop)
    }
}

impl Sidecars<'_> {
    pub(in crate::bench) async fn stop(self) -> Result<()> {
        for sidecar in self.0 {
            sidecar.kill().await?;
        }
        Ok(())
    }
}

/// Creates the peer's StorageClass, and grants it all rights.
pub(in crate::bench) async fn create_objects(client: &Client) -> Result<()> {
    let class: StorageClass = serde_json::from_value(json!({
        "metadata": {"name": CLASS}, "provisioner": DRIVER_NAME, "volumeBindingMode": "WaitForFirstConsumer",
    }))?;
    let created = Api::all(client.clone()).create(&PostParams::default(), &class).await;
    created.map_err(api_error).with_context(|| format!("create storage class {CLASS}"))?;
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": BINDING},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}],
    }))?;
    let created = Api::all(client.clone()).create(&PostParams::default(), &binding).await;
    created.map_err(api_error).with_context(|| format!("create ClusterRoleBinding {BINDING}")).map(drop)
}

/// Returns the peer's certificate.
pub(in crate::bench) fn caller(control_plane: &ControlPlane) -> Result<Identity> {
    control_plane.authority().client(Subject { user: USER, group: Some(GROUP) })
}

fn driver_args(node: &str) -> Vec<String> {
    vec![
        format!("--driver-name={DRIVER_NAME}"),
        format!("--node-name={node}"),
        format!("--data-dir={DATA_DIR}"),
        format!("--endpoint=unix://{DIR}/{SOCKET}"),
    ]
}

/// Returns the arguments of the provisioner. Its kubeconfig and the socket of its CSI controller are in `directory`.
pub(in crate::bench) fn provisioner_args(directory: &str, limits: Limits) -> Vec<String> {
    let own = [
        "--node-deployment",
        "--feature-gates=Topology=true",
        "--strict-topology",
        "--immediate-topology=false",
    ];
    own.iter().map(|&arg| arg.to_owned()).chain(sidecar_args(directory, limits)).collect()
}

/// Returns the arguments of the resizer, which are those of each sidecar. Its kubeconfig and the socket of its CSI controller are in
/// `directory`.
pub(in crate::bench) fn sidecar_args(directory: &str, limits: Limits) -> Vec<String> {
    let mut args =
        vec![format!("--csi-address={directory}/{SOCKET}"), format!("--kubeconfig={directory}/{KUBECONFIG}")];
    if limits == Limits::Lifted {
        args.extend(["--kube-api-qps=10000".to_owned(), "--kube-api-burst=10000".to_owned()]);
    }
    args
}

#[cfg(test)]
mod tests {
    use testvm_cluster::TOOLS_DIR;

    use super::*;

    #[test]
    fn only_the_limits_differ() {
        let (usual, lifted) = (provisioner_args(DIR, Limits::Default), provisioner_args(DIR, Limits::Lifted));
        assert!(lifted.starts_with(&usual));
        assert!(lifted[usual.len()..].iter().all(|arg| arg.starts_with("--kube-api-")));
        for (program, path) in [PROVISIONER, RESIZER, DRIVER].iter().zip(PROGRAMS) {
            assert_eq!(path, format!("{TOOLS_DIR}/{program}"));
        }
    }
}
