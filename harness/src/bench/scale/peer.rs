//! The peer: external-provisioner with `--node-deployment` and external-resizer, as processes of this machine. Each is beside a CSI
//! controller whose volumes are in memory. The controllers have the name of our driver, so the claims of the other node belong to the
//! peer's driver as well.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::process::{Process, Program};
use testvm::session::Session;
use testvm_cluster::{ControlPlane, Subject};

use super::super::audit_log::AuditLog;
use super::super::memory_controller::MemoryController;
use super::super::provision::peer::{self, Limits};
use super::idle::Observed;
use super::measured_process::DRIVER;
use super::proxied_process::ProxiedProcess;

/// The API server sends a bookmark on each watch about once a minute.
const QUIET_TIME: Duration = Duration::from_secs(5);
/// The programs have no work that must be completed.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// The part of a log line with which client-go reports, at this verbosity, that a process has received all claims.
const CLAIMS_RECEIVED: &str = r#""Caches populated" type="*v1.PersistentVolumeClaim""#;
const VERBOSITY: &str = "--v=2";

/// A program of the peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Sidecar {
    Provisioner,
    Resizer,
}

/// The programs of the peer.
pub(super) struct Programs {
    sidecars: PathBuf,
    controller: MemoryController,
}

/// The peer of one node, beside a control plane.
pub(super) struct Peer<'a> {
    programs: &'a Programs,
    control_plane: &'a ControlPlane,
    node: &'a str,
}

/// A running program of the peer with its CSI controller. Dropping it kills both processes.
pub(super) struct RunningSidecar {
    process: ProxiedProcess,
    controller: Process,
    user: &'static str,
    log: AuditLog,
    /// The end of the audit log when the program started.
    log_start: u64,
}

impl Sidecar {
    pub(super) const ALL: [Sidecar; 2] = [Sidecar::Provisioner, Sidecar::Resizer];

    /// Returns the beginning of the names of its rows.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Sidecar::Provisioner => "peer_csi_provisioner",
            Sidecar::Resizer => "peer_csi_resizer",
        }
    }

    /// Returns the name of its program, which is also its user name at the API server.
    const fn program(self) -> &'static str {
        match self {
            Sidecar::Provisioner => peer::PROVISIONER,
            Sidecar::Resizer => peer::RESIZER,
        }
    }

    fn args(self, directory: &str) -> Vec<String> {
        match self {
            Sidecar::Provisioner => peer::provisioner_args(directory, Limits::Default),
            Sidecar::Resizer => peer::sidecar_args(directory, Limits::Default),
        }
    }
}

impl Programs {
    /// Builds the programs or takes them from the cache.
    pub(super) async fn build(session: &Session) -> Result<Programs> {
        let sidecars = peer::build_sidecars(session).await?;
        Ok(Programs { sidecars, controller: MemoryController::build(session).await? })
    }

    /// Returns the peer of `node`, which has the administrator's rights.
    pub(super) fn beside<'a>(&'a self, control_plane: &'a ControlPlane, node: &'a str) -> Peer<'a> {
        Peer { programs: self, control_plane, node }
    }
}

impl Peer<'_> {
    /// Starts both programs, and waits until they have received all claims and are idle. The name of each log ends with `suffix`.
    pub(super) async fn start(&self, logs: &Path, suffix: &str) -> Result<[RunningSidecar; 2]> {
        let [provisioner, resizer] = Sidecar::ALL.map(|sidecar| self.start_one(sidecar, logs, suffix));
        let (provisioner, resizer) = tokio::try_join!(provisioner, resizer)?;
        let started = [provisioner, resizer];
        for sidecar in &started {
            sidecar.process.until_idle().await?;
        }
        Ok(started)
    }

    async fn start_one(&self, sidecar: Sidecar, logs: &Path, suffix: &str) -> Result<RunningSidecar> {
        let name = sidecar.program();
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let socket = directory.path().join(peer::SOCKET);
        let controller = self.programs.controller.program(&socket, DRIVER, self.node);
        let controller = controller.log(logs.join(format!("{name}-controller-{suffix}.log"))).spawn()?;

        let caller = Subject { user: name, group: Some("system:masters") };
        let caller = self.control_plane.authority().client(caller)?;
        let kubeconfig = self.control_plane.host_kubeconfig(&caller);
        let path = directory.path().to_str().context("the temporary directory has no text as its path")?;
        let log_path = logs.join(format!("{name}-{suffix}.log"));
        let program = Program::new(self.programs.sidecars.join(name))
            .args(sidecar.args(path))
            .arg(VERBOSITY)
            .env("NODE_NAME", self.node)
            .log(&log_path);
        let log = AuditLog::of(self.control_plane.layout());
        let log_start = log.end()?;
        let process = ProxiedProcess::start(name, QUIET_TIME, directory, &kubeconfig, program).await?;
        let pending = async || match std::fs::read_to_string(&log_path) {
            Ok(text) if text.contains(CLAIMS_RECEIVED) => None,
            Ok(_) => Some("it has not received all claims".to_owned()),
            Err(error) => Some(format!("read {}: {error}", log_path.display())),
        };
        process.poll(pending).await.with_context(|| format!("see {}", log_path.display()))?;
        Ok(RunningSidecar { process, controller, user: name, log, log_start })
    }
}

impl RunningSidecar {
    pub(super) async fn stop(self) -> Result<()> {
        self.process.stop(STOP_GRACE).await?;
        self.controller.stop(STOP_GRACE).await?;
        Ok(())
    }
}

impl Observed for RunningSidecar {
    fn process(&self) -> &ProxiedProcess {
        &self.process
    }

    async fn requests(&self) -> Result<f64> {
        Ok(self.log.requests(self.log_start, self.user)?.all() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_provisioner_has_the_option_node_deployment() {
        let args = Sidecar::ALL.map(|sidecar| sidecar.args("/d"));
        let has_option = args.each_ref().map(|args| args.contains(&"--node-deployment".to_owned()));
        assert_eq!(has_option, [true, false]);
        for args in args {
            let kubeconfig = format!("--kubeconfig=/d/{}", peer::KUBECONFIG);
            assert!(args.contains(&kubeconfig) && args.iter().all(|arg| !arg.starts_with("--kube-api-")));
        }
    }
}
