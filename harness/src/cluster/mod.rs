//! A Kubernetes control plane on the host and its nodes in virtual machines.
//!
//! The control plane is processes on the host's loopback; a node is a machine with containerd, kubelet and
//! kube-proxy, and a disk for the driver. Another node is a call of [`Cluster::boot_node`].

pub(crate) mod api_error;
pub(crate) mod background;
mod components;
mod control_plane;
mod images;
mod kubeconfig;
mod layout;
mod loopback;
mod node;
mod node_spec;
pub(crate) mod pki;
mod pod_token;
mod programs;
mod up;
pub(crate) mod waiting;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;

pub(crate) use self::control_plane::ControlPlane;
use self::images::NodeParts;
use self::layout::Layout;
use self::programs::Programs;
use crate::cache;
use crate::session::Session;
use crate::vm::Accelerator;

pub use self::components::{Durability, Purpose};
pub(crate) use self::images::VOLUME_CHECK;
pub use self::node::Node;
pub use self::node_spec::DataDisk;
pub(crate) use self::node_spec::{DATA_DIR, DATA_OPTIONS, TOOLS_DIR, USER_NAMESPACES_HANDLER};
pub use self::up::{DownArgs, UpArgs, down, up, walkthrough};

/// How often a cluster that is only kept running is looked at.
const PULSE: Duration = Duration::from_secs(5);

/// What a cluster is made of.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// Holds its keys, its state and its disks; emptied first.
    pub dir: PathBuf,
    /// Holds the log of every component.
    pub logs: PathBuf,
    /// How the control plane's store treats its disk.
    pub durability: Durability,
    pub purpose: Purpose,
}

/// The programs and disks that clusters are made of.
#[derive(Debug)]
pub struct Parts {
    programs: Programs,
    node: NodeParts,
    /// The disk with the programs of Kubernetes that run on a node.
    tools_disk: PathBuf,
}

impl Parts {
    /// Builds what is not there yet; Kubernetes' programs are taken from `kubernetes_bin` where they are
    /// there.
    ///
    /// # Errors
    /// Something cannot be fetched or built.
    pub async fn build(session: &Session, kubernetes_bin: Option<&Path>) -> Result<Parts> {
        Parts::build_with(session, kubernetes_bin, &[]).await
    }

    /// The same, with more programs in the nodes' [`TOOLS_DIR`]: what each is called there, and where it is here.
    ///
    /// # Errors
    /// As [`Parts::build`].
    pub(crate) async fn build_with(
        session: &Session,
        kubernetes_bin: Option<&Path>,
        tools: &[(String, PathBuf)],
    ) -> Result<Parts> {
        let programs = Programs::ensure(session, kubernetes_bin);
        let (programs, node) = tokio::try_join!(programs, NodeParts::prepare(session))?;
        let tools_disk = images::tools_disk(session, &programs, tools).await?;
        Ok(Parts { programs, node, tools_disk })
    }

    /// What nodes run on.
    pub(crate) fn accelerator(&self) -> Accelerator {
        self.node.hypervisor.accelerator
    }
}

impl ControlPlane {
    /// Starts a control plane that has no nodes; Kubernetes' programs are taken from `kubernetes_bin` where they
    /// are there.
    ///
    /// # Errors
    /// Something cannot be built, or does not start; the message has the end of its log.
    pub(crate) async fn alone(
        session: &Session,
        spec: &ClusterSpec,
        kubernetes_bin: Option<&Path>,
    ) -> Result<ControlPlane> {
        let programs = Programs::ensure(session, kubernetes_bin).await?;
        for dir in [&spec.dir, &spec.logs] {
            empty(dir)?;
        }
        let layout = Layout::new(&absolute(&spec.dir)?, &absolute(&spec.logs)?);
        ControlPlane::start(session, programs, layout, spec.durability, spec.purpose).await
    }
}

/// A running cluster. Dropping it kills everything in it; [`Cluster::stop`] is the orderly end.
pub struct Cluster {
    control_plane: ControlPlane,
    parts: Parts,
    nodes: Vec<Node>,
}

impl Cluster {
    /// Starts a control plane and one node, and waits until the node is ready.
    ///
    /// # Errors
    /// Something does not start; the message has the end of its log.
    pub async fn start(session: &Session, spec: ClusterSpec, parts: Parts) -> Result<Cluster> {
        for dir in [&spec.dir, &spec.logs] {
            empty(dir)?;
        }
        let layout = Layout::new(&absolute(&spec.dir)?, &absolute(&spec.logs)?);
        let programs = parts.programs.clone();
        let control_plane =
            ControlPlane::start(session, programs, layout, spec.durability, spec.purpose).await?;
        let mut cluster = Cluster { control_plane, parts, nodes: Vec::new() };
        let node = cluster.boot_node(session, 0, DataDisk::Mounted).await?;
        cluster.nodes.push(node);
        Ok(cluster)
    }

    /// Boots a node and waits until Kubernetes calls it ready. The first is the cluster's own; another is the caller's to
    /// stop, before the cluster.
    ///
    /// # Errors
    /// It does not boot, or does not become ready in time.
    pub async fn boot_node(&self, session: &Session, index: u8, data_disk: DataDisk) -> Result<Node> {
        Node::start(session, &self.control_plane, &self.parts, index, data_disk).await
    }

    /// The control plane itself: who is known to it, and what it logs.
    pub(crate) fn control_plane(&self) -> &ControlPlane {
        &self.control_plane
    }

    /// A client with the administrator's rights.
    #[must_use]
    pub fn client(&self) -> &Client {
        self.control_plane.client()
    }

    /// The administrator's kubeconfig file.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.control_plane.kubeconfig()
    }

    /// A kubectl of the cluster's version.
    #[must_use]
    pub fn kubectl(&self) -> &Path {
        &self.control_plane.programs().kubectl
    }

    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Kills the API server and starts it again, as a crash on its machine would.
    ///
    /// # Errors
    /// It does not come back.
    pub async fn restart_api_server(&self) -> Result<()> {
        self.control_plane.restart_api_server().await
    }

    /// Keeps the cluster until the session is cancelled, then stops it.
    ///
    /// # Errors
    /// A component ended by itself, or the cluster cannot be stopped.
    pub async fn serve_until_cancelled(self, session: &Session) -> Result<()> {
        loop {
            tokio::select! {
                () = session.cancel.cancelled() => return self.stop().await,
                () = tokio::time::sleep(PULSE) => self.control_plane.check_alive().await?,
            }
        }
    }

    /// Ends the nodes, then the control plane.
    ///
    /// # Errors
    /// Something did not end in order; nothing is left running all the same.
    pub async fn stop(self) -> Result<()> {
        let mut stopped = Ok(());
        for node in self.nodes {
            // The others must be stopped too; the first error is the one to tell.
            let result = node.stop().await;
            stopped = stopped.and(result);
        }
        stopped.and(self.control_plane.stop().await)
    }
}

/// Makes a directory of ours, without what a run before left in it.
fn empty(dir: &Path) -> Result<()> {
    cache::remove_dir(dir)?;
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))
}

fn absolute(dir: &Path) -> Result<PathBuf> {
    fs::canonicalize(dir).with_context(|| format!("find {}", dir.display()))
}
