//! A running cluster: a control plane and the nodes that belong to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use kube::Client;
use testvm::session::{Project, Session};

use super::control_plane::ControlPlane;
use super::layout::ClusterSpec;
use super::node::Node;
use super::node_spec::DataDisk;
use super::node_vm::unless_node_ends;
use super::parts::Parts;
use super::variant::NodeVariant;

/// The interval at which a cluster that is only kept running is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// A running cluster. Dropping it kills everything in it; [`Cluster::stop`] stops it in order.
pub struct Cluster {
    control_plane: ControlPlane,
    parts: Parts,
    node: Node,
}

impl Cluster {
    /// Starts a control plane and one node, and waits until the node is ready.
    ///
    /// # Errors
    /// A component does not start; the message has the end of its log.
    pub async fn start(session: &Session, spec: ClusterSpec, parts: Parts) -> Result<Cluster> {
        Cluster::start_diagnosed(session, spec, parts, async |_: &Node| ()).await
    }

    /// Starts a cluster like [`Cluster::start`]. If the node boots and does not become Ready, it calls `diagnose` with the
    /// node before it returns the error.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub async fn start_diagnosed(
        session: &Session,
        spec: ClusterSpec,
        parts: Parts,
        diagnose: impl AsyncFnOnce(&Node),
    ) -> Result<Cluster> {
        let control_plane = ControlPlane::start(session, &spec, parts.programs.clone()).await?;
        let node = Node::start(session, &control_plane, &parts, 0, DataDisk::Mounted, diagnose).await?;
        Ok(Cluster { control_plane, parts, node })
    }

    /// Boots a node and waits until it is Ready. The cluster stops its first node itself. The caller must
    /// stop every other node before the cluster.
    ///
    /// # Errors
    /// The node does not boot, or does not become Ready in time.
    pub async fn boot_node(&self, session: &Session, index: u8, data_disk: DataDisk) -> Result<Node> {
        let (control_plane, parts) = (&self.control_plane, &self.parts);
        Node::start(session, control_plane, parts, index, data_disk, async |_: &Node| ()).await
    }

    /// Returns the control plane.
    pub fn control_plane(&self) -> &ControlPlane {
        &self.control_plane
    }

    /// Returns the variant of the nodes.
    #[must_use]
    pub fn variant(&self) -> &NodeVariant {
        &self.parts.node.variant
    }

    /// Returns a client with the administrator's rights.
    #[must_use]
    pub fn client(&self) -> &Client {
        self.control_plane.client()
    }

    /// Returns the path of the administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.control_plane.kubeconfig()
    }

    /// Returns the path of a kubectl of the cluster's version.
    #[must_use]
    pub fn kubectl(&self) -> &Path {
        self.control_plane.kubectl()
    }

    /// Returns commands for the user to paste.
    #[must_use]
    pub fn walkthrough(&self) -> String {
        walkthrough(self.control_plane.project(), &self.kubeconfig(), self.kubectl())
    }

    /// Returns the first node, which the cluster stops itself.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Kills the API server and restarts it, as after a crash.
    ///
    /// # Errors
    /// The API server does not become healthy again.
    pub async fn restart_api_server(&self) -> Result<()> {
        self.control_plane.restart_api_server().await
    }

    /// Keeps the cluster until the session is cancelled, then stops it.
    ///
    /// # Errors
    /// A component or the machine of a node ended by itself, or the cluster cannot be stopped.
    pub async fn serve_until_cancelled(self, session: &Session) -> Result<()> {
        let check = async {
            loop {
                tokio::time::sleep(CHECK_INTERVAL).await;
                self.control_plane.check_alive().await?;
            }
        };
        tokio::select! {
            () = session.cancel.cancelled() => {}
            ended = unless_node_ends(check) => return ended,
        }
        self.stop().await
    }

    /// Ends the node, then the control plane.
    ///
    /// # Errors
    /// A component did not end in order. Even then, no process is left.
    pub async fn stop(self) -> Result<()> {
        // The control plane must be stopped, too. The first error is returned.
        let stopped = self.node.stop().await;
        stopped.and(self.control_plane.stop().await)
    }
}

/// Returns commands for the user to paste.
pub fn walkthrough(project: Project, kubeconfig: &Path, kubectl: &Path) -> String {
    let directory = kubectl.parent().unwrap_or(Path::new(""));
    format!(
        "the cluster is up; to use it:\n\n  \
         export KUBECONFIG={}\n  \
         export PATH={}:$PATH\n  \
         kubectl get nodes,storageclasses,pods --all-namespaces\n\n\
         to remove it: {} down",
        kubeconfig.display(),
        directory.display(),
        project.command
    )
}
