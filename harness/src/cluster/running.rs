//! A running cluster: a control plane and the nodes that belong to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use kube::Client;

use super::control_plane::ControlPlane;
use super::node::Node;
use super::node_spec::DataDisk;
use super::parts::Parts;
use super::spec::ClusterSpec;
use crate::session::Session;

/// How often a cluster that is only kept running is looked at.
const PULSE: Duration = Duration::from_secs(5);

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
        let layout = spec.make_directories()?;
        let programs = parts.programs.clone();
        let control_plane =
            ControlPlane::start(session, programs, layout, spec.durability, spec.profile).await?;
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

    /// What to paste next.
    #[must_use]
    pub fn walkthrough(&self) -> String {
        walkthrough(&self.kubeconfig(), self.kubectl())
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

/// What to paste next.
pub(crate) fn walkthrough(kubeconfig: &Path, kubectl: &Path) -> String {
    let directory = kubectl.parent().unwrap_or(Path::new(""));
    format!(
        "the cluster is up; to use it:\n\n  \
         export KUBECONFIG={}\n  \
         export PATH={}:$PATH\n  \
         kubectl get nodes,storageclasses,pods --all-namespaces\n\n\
         to remove it: cargo harness down",
        kubeconfig.display(),
        directory.display()
    )
}
