//! external-provisioner as a process of this machine, beside a CSI controller whose volumes are in memory.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use tempfile::TempDir;
use testvm::process::{Process, Program};
use testvm::session::Session;
use testvm_cluster::ControlPlane;

use super::super::in_memory::{NODE, unless_ended};
use super::super::memory_controller::MemoryController;
use super::super::provision::peer::{self, Limits};

/// The programs have no work that must be completed.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// The programs of the peer.
pub(super) struct Programs {
    provisioner: PathBuf,
    controller: MemoryController,
}

/// The peer with its StorageClass and its kubeconfig.
pub(super) struct Peer<'a> {
    programs: &'a Programs,
    logs: &'a Path,
    /// The number of claims that it works on concurrently.
    workers: u64,
    /// The directory of its kubeconfig and its socket.
    directory: TempDir,
}

/// The running processes of the peer. Dropping them kills them.
pub(super) struct Running {
    controller: Process,
    provisioner: Process,
}

impl Programs {
    /// Builds the programs or takes them from the cache.
    pub(super) async fn build(session: &Session) -> Result<Programs> {
        let provisioner = peer::build_sidecars(session).await?.join(peer::PROVISIONER);
        let controller = MemoryController::build(session).await?;
        Ok(Programs { provisioner, controller })
    }

    /// Creates the peer's objects and its kubeconfig.
    pub(super) async fn install<'a>(
        &'a self,
        control_plane: &ControlPlane,
        logs: &'a Path,
        workers: u64,
    ) -> Result<Peer<'a>> {
        let client: &Client = control_plane.client();
        peer::create_objects(client).await?;
        // Only the owner can enter the directory.
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let path = directory.path().join(peer::KUBECONFIG);
        let kubeconfig = control_plane.host_kubeconfig(&peer::caller(control_plane)?);
        std::fs::write(&path, kubeconfig).with_context(|| format!("write {}", path.display()))?;
        Ok(Peer { programs: self, logs, workers, directory })
    }
}

impl Peer<'_> {
    /// Starts its CSI controller and its provisioner, which waits for the socket of the controller.
    pub(super) fn start(&self) -> Result<Running> {
        let socket = self.directory.path().join(peer::SOCKET);
        let controller = self.programs.controller.program(&socket, peer::DRIVER_NAME, NODE);
        let controller = controller.log(self.logs.join("peer-controller.log")).spawn()?;
        let directory =
            self.directory.path().to_str().context("the temporary directory has no text as its path")?;
        let provisioner = Program::new(&self.programs.provisioner)
            .args(peer::provisioner_args(directory, Limits::Lifted))
            .arg(format!("--worker-threads={}", self.workers))
            .env("NODE_NAME", NODE)
            .log(self.logs.join("peer-provisioner.log"))
            .spawn()?;
        Ok(Running { controller, provisioner })
    }
}

impl Running {
    /// Returns the id of the provisioner's process.
    pub(super) fn id(&self) -> i32 {
        self.provisioner.id()
    }

    /// Runs `measuring`. Returns an error if one of the processes ends before it.
    pub(super) async fn during<T>(&mut self, measuring: impl Future<Output = Result<T>>) -> Result<T> {
        unless_ended(&mut self.provisioner, unless_ended(&mut self.controller, measuring)).await
    }

    pub(super) async fn stop(self) -> Result<()> {
        self.provisioner.stop(STOP_GRACE).await?;
        self.controller.stop(STOP_GRACE).await?;
        Ok(())
    }
}
