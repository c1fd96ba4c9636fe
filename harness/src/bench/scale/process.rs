//! The processes under test: the provisioner, the controller, and the programs of the peer.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use testvm::process::Program;
use testvm_cluster::{ControlPlane, Subject};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::super::audit_log::AuditLog;
use super::super::cluster::DRIVER_USER;
use super::super::counting_proxy::CountingProxy;
use super::super::metrics;
use super::super::peer::{self, HostPeer, HostSidecar, Limits};
use super::super::process::{MeasuredProcess, NODE};
use crate::fake_nodes::{self, SYSTEM};

pub(super) const DRIVER: &str = "csi.loopfs.dev";
const CONTROLLER_USER: &str = "system:serviceaccount:loopfs-system:loopfs-controller";
/// The description of the measurements beside nodes that have no kubelets.
pub(super) const PLACE: &str = "this machine, nodes without kubelets";

const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Limits the shutdown of a process that completes operations in progress.
const STOP_GRACE: Duration = Duration::from_secs(20);
/// The API server sends a bookmark on each watch about once a minute.
const QUIET_TIME: Duration = Duration::from_secs(5);
/// Shorter than the five seconds after which the leader renews its Lease.
const QUIET_TIME_OF_CONTROLLER: Duration = Duration::from_secs(2);
/// The part of a log line with which client-go reports, at this verbosity, that a process has received all claims.
const CLAIMS_RECEIVED: &str = r#""Caches populated" type="*v1.PersistentVolumeClaim""#;
const VERBOSITY: &str = "--v=2";

/// A running process whose requests to the API server are counted. Dropping it kills the process.
pub(super) struct Observed {
    process: MeasuredProcess,
    /// A process that receives nothing for this time is idle.
    quiet_time: Duration,
    log: AuditLog,
    /// The end of the log when the process was started.
    log_start: u64,
    /// Its user name at the API server. No other process has it.
    user: &'static str,
    /// `false` for a sidecar, whose exit need not be clean.
    is_ours: bool,
}

/// The requests and the received bytes of a process while nothing happens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    pub(super) requests_per_minute: f64,
    bytes_per_second: f64,
}

/// The name of the driver's socket.
const SOCKET: &str = "control.sock";

/// The parts of a command line that all runs of our program share.
pub(super) struct Installation<'a> {
    pub(super) log: AuditLog,
    pub(super) program: PathBuf,
    /// The driver to which a provisioner connects.
    pub(super) driver: Option<PathBuf>,
    pub(super) node: &'a str,
    /// The pod of the driver on the node, as which the process runs.
    pub(super) pod: Pod,
    /// The kubeconfig with the rights of that pod.
    pub(super) kubeconfig: PathBuf,
}

impl Installation<'static> {
    /// Returns the installation of the provisioner of [`NODE`].
    pub(super) async fn of_provisioner(
        program: PathBuf,
        driver: PathBuf,
        control_plane: &ControlPlane,
        kubeconfigs: &Path,
    ) -> Result<Self> {
        let pod = fake_nodes::pod_of_driver(control_plane.client(), NODE).await?;
        let kubeconfig = fake_nodes::kubeconfig(kubeconfigs, NODE);
        let log = AuditLog::of(control_plane.layout());
        Ok(Self { log, program, driver: Some(driver), node: NODE, pod, kubeconfig })
    }
}

impl Installation<'_> {
    /// Starts the provisioner of the node, and waits until it has read the objects of the API server and is idle. It watches the claims
    /// with the label that the component `labels` gives them, or all claims of the cluster.
    pub(super) async fn start_provisioner(&self, labels: Option<&str>, log: &Path) -> Result<Observed> {
        let uid = self.pod.uid().context("the pod of the driver has no UID")?;
        let complete = |program: Program, directory: &Path| {
            // The driver has no storage. On such a node, the provisioner is ready all the same.
            let socket = format!("unix://{}", directory.join(SOCKET).display());
            let program = program.args(["--driver-socket", &socket]).env("POD_UID", uid);
            labels.into_iter().fold(program, |program, name| program.args(["--claim-labels", name]))
        };
        let (provisioner, address) = self.start("node", DRIVER_USER, QUIET_TIME, log, complete).await?;
        provisioner.until_idle().await?;
        let scope = metric(address, "loopfs_provisioner_watches_all_claims").await?;
        anyhow::ensure!(
            scope == Some(if labels.is_some() { 0.0 } else { 1.0 }),
            "the provisioner does not watch the claims that it should: watches_all_claims is {scope:?}"
        );
        Ok(provisioner)
    }

    /// Starts a replica of the controller, and waits until it leads, has read the objects of the API server and is idle.
    pub(super) async fn start_controller(&self, log: &Path) -> Result<Observed> {
        let (user, quiet_time) = (CONTROLLER_USER, QUIET_TIME_OF_CONTROLLER);
        let (controller, address) =
            self.start("controller", user, quiet_time, log, |program, _| program).await?;
        let pending = async || match metric(address, "loopfs_controller_leads").await {
            Ok(Some(1.0)) => None,
            other => Some(format!("leads is {other:?}")),
        };
        controller.process.poll(pending).await?;
        // A replica is ready before it leads. From then on, it is ready when it has read the claims, classes and CSINodes.
        until_ready(&controller.process, address).await?;
        controller.until_idle().await?;
        Ok(controller)
    }

    /// Starts the program in a role with the options that `complete` adds, and waits until it is ready. `complete` also receives an empty
    /// directory for the files of the process. Also returns the address of its metrics.
    async fn start(
        &self,
        role: &str,
        user: &'static str,
        quiet_time: Duration,
        log: &Path,
        complete: impl FnOnce(Program, &Path) -> Program,
    ) -> Result<(Observed, SocketAddr)> {
        let log_start = self.log.end()?;
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let (files, kubeconfig) = (directory.path().join("files"), directory.path().join("kubeconfig"));
        let given = std::fs::read_to_string(&self.kubeconfig)
            .with_context(|| format!("read {}", self.kubeconfig.display()))?;
        let proxy = CountingProxy::of_kubeconfig(&given).await?;
        std::fs::write(&kubeconfig, proxy.redirect(&given)?)
            .with_context(|| format!("write {}", kubeconfig.display()))?;
        std::fs::create_dir(&files).with_context(|| format!("create {}", files.display()))?;

        let address = free_address()?;
        let program = Program::new(&self.program)
            .named(&format!("loopfs-provisioner {role}"))
            .args([role, "--driver-name", DRIVER, "--node-name", self.node])
            .args(["--node-loss", "dry-run", "--metrics-address", &address.to_string()])
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .env("POD_NAMESPACE", SYSTEM)
            .env("POD_NAME", self.pod.name_any())
            .log(log);
        let driver = self.driver.as_ref().map(|driver| {
            let driver = Program::new(driver).arg(files.join(SOCKET)).args([DRIVER, self.node]);
            driver.log(log.with_extension("driver.log")).spawn()
        });
        let process = MeasuredProcess {
            controller: driver.transpose()?,
            process: complete(program, &files).spawn()?,
            proxy: Some(proxy),
            _directory: Some(directory),
        };
        until_ready(&process, address).await.with_context(|| format!("see {}", log.display()))?;
        let log = self.log.clone();
        Ok((Observed { process, quiet_time, log, log_start, user, is_ours: true }, address))
    }
}

/// Starts a program of the peer, which has the administrator's rights, and waits until it has received all claims. Its CSI controller
/// has the name of our driver, so the claims of the other node belong to the peer's driver as well.
pub(super) async fn start_sidecar(
    peer: &HostPeer,
    control_plane: &ControlPlane,
    name: &'static str,
    log_path: &Path,
) -> Result<Observed> {
    let log = AuditLog::of(control_plane.layout());
    let log_start = log.end()?;
    let caller = Subject { user: name, group: Some("system:masters") };
    let sidecar = HostSidecar {
        name,
        caller,
        driver: DRIVER,
        limits: Limits::Default,
        option: VERBOSITY,
        is_proxied: true,
    };
    let process = peer.start(control_plane, sidecar, log_path).await?;
    let pending = async || match std::fs::read_to_string(log_path) {
        Ok(text) if text.contains(CLAIMS_RECEIVED) => None,
        Ok(_) => Some("it has not received all claims".to_owned()),
        Err(error) => Some(format!("read {}: {error}", log_path.display())),
    };
    process.poll(pending).await.with_context(|| format!("see {}", log_path.display()))?;
    Ok(Observed { process, quiet_time: QUIET_TIME, log, log_start, user: name, is_ours: false })
}

impl Observed {
    /// Returns the bytes that it has received from the API server since its start.
    pub(super) fn received(&self) -> u64 {
        self.process.received()
    }

    pub(super) fn memory(&self, field: &str) -> Result<f64> {
        self.process.memory(field)
    }

    /// Waits until it receives nothing, and returns the bytes that it has received from the API server since its start.
    pub(super) async fn until_idle(&self) -> Result<u64> {
        self.process.until_idle(self.quiet_time).await
    }

    /// Returns the number of requests that it has sent to the API server since its start, with its watches.
    pub(super) fn requests(&self) -> Result<f64> {
        let all = self.log.requests(self.log_start, self.user)?.all();
        // The process has read objects since its start. If there is no request, it has another user name in the log.
        anyhow::ensure!(all > 0, "the audit log has no request of {}", self.user);
        Ok(all as f64)
    }

    /// Observes the idle process for `time`.
    pub(super) async fn idle(&self, time: Duration) -> Result<Idle> {
        let (requests, received, since) = (self.requests()?, self.received(), Instant::now());
        tokio::time::sleep(time).await;
        let elapsed = since.elapsed().as_secs_f64();
        Ok(Idle {
            requests_per_minute: (self.requests()? - requests) * 60.0 / elapsed,
            bytes_per_second: (self.received() - received) as f64 / elapsed,
        })
    }

    pub(super) async fn stop(self) -> Result<()> {
        if self.is_ours {
            return self.process.stop(STOP_GRACE).await;
        }
        self.process.stop_in_any_way(peer::STOP_GRACE).await.map(drop)
    }
}

impl Idle {
    /// Returns the bytes of `received` that remain without those that an idle process receives in this time: bookmarks of its watches
    /// and responses to periodic requests.
    pub(super) fn without(&self, received: u64, time: Duration) -> f64 {
        (received as f64 - self.bytes_per_second * time.as_secs_f64()).max(0.0)
    }
}

/// Returns an address of the loopback that is free now. Another process may take it, and the process then does not start.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("bind a port of the loopback")?;
    listener.local_addr().context("read the address of a socket")
}

/// Waits until the caches of our program have all objects.
async fn until_ready(process: &MeasuredProcess, address: SocketAddr) -> Result<()> {
    let pending = async || match page(address, "/readyz").await {
        Ok((200, _)) => None,
        Ok((status, reason)) => Some(format!("/readyz returns {status}: {reason}")),
        Err(error) => Some(format!("{error:#}")),
    };
    process.poll(pending).await
}

/// Returns the value of a metric without labels, or `None` if our program has no such metric.
async fn metric(address: SocketAddr, name: &str) -> Result<Option<f64>> {
    let (status, metrics) = page(address, "/metrics").await?;
    anyhow::ensure!(status == 200, "/metrics returns {status}: {metrics}");
    Ok(metrics::value(&metrics, name))
}

/// Returns the HTTP status and the body of a page.
async fn page(address: SocketAddr, path: &str) -> Result<(u16, String)> {
    let read = async {
        let mut connection = TcpStream::connect(address).await?;
        // The server closes the connection after the response, because of HTTP/1.0.
        connection.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
        let mut response = String::new();
        connection.read_to_string(&mut response).await?;
        std::io::Result::Ok(response)
    };
    let response = tokio::time::timeout(PAGE_TIMEOUT, read).await;
    let response = response.with_context(|| format!("{path} did not return in {PAGE_TIMEOUT:?}"))?;
    parse_response(&response.with_context(|| format!("read {path}"))?)
}

fn parse_response(response: &str) -> Result<(u16, String)> {
    let (head, body) = response.split_once("\r\n\r\n").context("the response has no end of its head")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("the response has no status: {head}"))?, body.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_has_status_and_body() {
        let parsed =
            parse_response("HTTP/1.0 503 Service Unavailable\r\nx: y\r\n\r\nnot yet\r\n\r\n").unwrap();
        assert_eq!(parsed, (503, "not yet\r\n\r\n".to_owned()));
        assert!(parse_response("").is_err());
    }

    #[test]
    fn idle_traffic_is_subtracted() {
        let idle = Idle { requests_per_minute: 0.0, bytes_per_second: 10.0 };
        assert_eq!(idle.without(100, Duration::from_secs(3)), 70.0);
        assert_eq!(idle.without(20, Duration::from_secs(3)), 0.0, "fewer bytes than while nothing happened");
    }
}
