//! The process under test: the provisioner of a node, whose connections to the API server go through a proxy.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::Value;
use tempfile::TempDir;
use testvm::process::{Process, Program};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::counting_proxy::CountingProxy;
use super::labels;

pub(super) const DRIVER: &str = "csi.loopfs.dev";

/// The timeout of the start: the process receives all claims of the cluster.
const START_TIMEOUT: Duration = Duration::from_secs(900);
/// A process that receives nothing for this time is idle. The API server sends a bookmark on each watch about once a minute.
const QUIET_TIME: Duration = Duration::from_secs(5);
const READY_POLL_INTERVAL: Duration = Duration::from_millis(200);
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Limits the shutdown of a provisioner that completes operations in progress.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// The claims that a provisioner watches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Contender {
    /// Those with the label of its node, by the component claim-labels.
    Labels,
    /// All claims of the cluster.
    All,
}

impl Contender {
    pub(super) const BOTH: [Contender; 2] = [Contender::Labels, Contender::All];

    /// Returns the beginning of the names of its rows.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Contender::Labels => "labels",
            Contender::All => "all",
        }
    }
}

/// The parts of a provisioner's command line that all runs share.
pub(super) struct Installation<'a> {
    pub(super) program: PathBuf,
    pub(super) node: &'a str,
    /// The driver's pod on the node.
    pub(super) pod: Pod,
    /// The kubeconfig with the rights of that pod.
    pub(super) kubeconfig: PathBuf,
}

/// A running provisioner. Dropping it kills the process.
pub(super) struct Provisioner {
    process: Process,
    proxy: CountingProxy,
    endpoints: SocketAddr,
    /// Removed after the process, which has its files there.
    _directory: TempDir,
}

impl Provisioner {
    /// Starts the provisioner, and waits until it has read the objects of the API server and is idle.
    pub(super) async fn start(
        installation: &Installation<'_>,
        contender: Contender,
        log: &Path,
    ) -> Result<Provisioner> {
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let text = std::fs::read_to_string(&installation.kubeconfig)
            .with_context(|| format!("read {}", installation.kubeconfig.display()))?;
        let mut kubeconfig: Value = serde_json::from_str(&text).context("parse the kubeconfig")?;
        let proxy = CountingProxy::start(server_of(&kubeconfig)?).await?;
        redirect(&mut kubeconfig, proxy.address())?;
        let path = directory.path().join("kubeconfig");
        std::fs::write(&path, kubeconfig.to_string()).with_context(|| format!("write {}", path.display()))?;
        // An ordinary directory. On a node without a file system for volumes, the provisioner is ready all the same.
        let data = directory.path().join("data");
        std::fs::create_dir(&data).with_context(|| format!("create {}", data.display()))?;

        let endpoints = free_address()?;
        let pod = &installation.pod;
        let mut program = Program::new(&installation.program)
            .args(["node", "--driver-name", DRIVER, "--node-name", installation.node])
            .args(["--node-loss", "dry-run", "--metrics-address", &endpoints.to_string()])
            .arg("--data-dir")
            .arg(data)
            .arg("--kubeconfig")
            .arg(path)
            .env("POD_NAMESPACE", labels::SYSTEM)
            .env("POD_NAME", pod.name_any())
            .env("POD_UID", pod.uid().context("the pod of the driver has no UID")?)
            .log(log);
        if contender == Contender::Labels {
            program = program.args(["--claim-labels", labels::NAME]);
        }
        let provisioner = Provisioner { process: program.spawn()?, proxy, endpoints, _directory: directory };
        provisioner.until_ready().await.with_context(|| format!("see {}", log.display()))?;
        provisioner.until_idle().await?;
        let scope = gauge(&provisioner.page("/metrics").await?.1, "loopfs_provisioner_watches_all_claims");
        let expected = f64::from(u8::from(contender == Contender::All));
        anyhow::ensure!(
            scope == Some(expected),
            "the provisioner does not watch the claims that it should: watches_all_claims is {scope:?}"
        );
        Ok(provisioner)
    }

    /// Waits until its caches have all objects.
    async fn until_ready(&self) -> Result<()> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait() {
                anyhow::bail!("the provisioner ended with {status}");
            }
            // It listens a moment after its start.
            let reason = match self.page("/readyz").await {
                Ok((200, _)) => return Ok(()),
                Ok((status, reason)) => format!("{status} {reason}"),
                Err(error) => format!("{error:#}"),
            };
            anyhow::ensure!(
                started.elapsed() < START_TIMEOUT,
                "the provisioner is not ready after {START_TIMEOUT:?}: {reason}"
            );
            tokio::time::sleep(READY_POLL_INTERVAL).await;
        }
    }

    /// Waits until it receives nothing, and returns the bytes that it has received from the API server since its start.
    pub(super) async fn until_idle(&self) -> Result<u64> {
        self.proxy.until_quiet(QUIET_TIME, START_TIMEOUT).await
    }

    /// Returns the bytes that it has received from the API server since its start.
    pub(super) fn received(&self) -> u64 {
        self.proxy.received()
    }

    /// Returns its resident memory in bytes.
    pub(super) fn rss(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.process.id());
        let status = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        rss_of(&status).with_context(|| format!("{path} has no VmRSS"))
    }

    /// Returns the number of requests that it has sent to the API server since its start.
    pub(super) async fn requests(&self) -> Result<f64> {
        let (status, metrics) = self.page("/metrics").await?;
        anyhow::ensure!(status == 200, "/metrics returns {status}: {metrics}");
        Ok(requests_in(&metrics))
    }

    pub(super) async fn stop(self) -> Result<()> {
        let status = self.process.stop(STOP_GRACE).await?;
        anyhow::ensure!(status.success(), "the provisioner did not exit cleanly: {status}");
        Ok(())
    }

    /// Returns the HTTP status and the body of a page of the process.
    async fn page(&self, path: &str) -> Result<(u16, String)> {
        let read = async {
            let mut connection = TcpStream::connect(self.endpoints).await?;
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
}

/// Returns an address of the loopback that is free now. Another process may take it, and the provisioner then does not start.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("bind a port of the loopback")?;
    listener.local_addr().context("read the address of a socket")
}

const SERVER: &str = "/clusters/0/cluster/server";

fn server_of(kubeconfig: &Value) -> Result<SocketAddr> {
    let server =
        kubeconfig.pointer(SERVER).and_then(Value::as_str).and_then(|url| url.strip_prefix("https://"));
    let server = server.context("the kubeconfig names no server")?;
    server.parse().with_context(|| format!("parse the address {server}"))
}

/// Replaces the server's address. The certificate of the API server covers its IP address with any port.
fn redirect(kubeconfig: &mut Value, proxy: SocketAddr) -> Result<()> {
    let server = kubeconfig.pointer_mut(SERVER).context("the kubeconfig names no server")?;
    *server = format!("https://{proxy}").into();
    Ok(())
}

fn parse_response(response: &str) -> Result<(u16, String)> {
    let (head, body) = response.split_once("\r\n\r\n").context("the response has no end of its head")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("the response has no status: {head}"))?, body.to_owned()))
}

/// Returns the sum of all reads and writes in a page of metrics.
fn requests_in(metrics: &str) -> f64 {
    let prefixes = ["loopfs_provisioner_api_reads_total{", "loopfs_provisioner_api_writes_total{"];
    let lines = metrics.lines().filter(|line| prefixes.iter().any(|prefix| line.starts_with(prefix)));
    lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

/// Returns the value of a metric without labels.
fn gauge(metrics: &str, name: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Returns the bytes of a line such as `VmRSS:     1234 kB`.
fn rss_of(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const METRICS: &str = "# TYPE loopfs_provisioner_api_reads counter\n\
                           loopfs_provisioner_api_reads_total{verb=\"list\",resource=\"nodes\",code=\"200\"} 3\n\
                           loopfs_provisioner_api_reads_total{verb=\"watch\",resource=\"nodes\",code=\"200\"} 4\n\
                           loopfs_provisioner_api_writes_total{verb=\"patch\",resource=\"nodes\",code=\"200\"} 5\n\
                           loopfs_provisioner_watches_all_claims 1\n";

    #[test]
    fn all_reads_and_writes_are_requests() {
        assert_eq!(requests_in(METRICS), 12.0);
        assert_eq!(requests_in(""), 0.0);
        assert_eq!(gauge(METRICS, "loopfs_provisioner_watches_all_claims"), Some(1.0));
        assert_eq!(gauge(METRICS, "loopfs_provisioner_watches_all"), None);
    }

    #[test]
    fn a_response_has_a_status_and_a_body() {
        let parsed =
            parse_response("HTTP/1.0 503 Service Unavailable\r\nx: y\r\n\r\nnot yet\r\n\r\n").unwrap();
        assert_eq!(parsed, (503, "not yet\r\n\r\n".to_owned()));
        assert!(parse_response("").is_err());
    }

    #[test]
    fn a_redirected_kubeconfig_names_the_proxy() {
        let mut kubeconfig = json!({"clusters": [{"cluster": {"server": "https://127.0.0.1:21000"}}]});
        assert_eq!(server_of(&kubeconfig).unwrap(), "127.0.0.1:21000".parse().unwrap());
        redirect(&mut kubeconfig, "127.0.0.1:9".parse().unwrap()).unwrap();
        assert_eq!(server_of(&kubeconfig).unwrap(), "127.0.0.1:9".parse().unwrap());
        assert!(server_of(&json!({})).is_err() && redirect(&mut json!({}), free_address().unwrap()).is_err());
    }

    #[test]
    fn the_resident_memory_is_in_bytes() {
        assert_eq!(rss_of("Name:\tx\nVmRSS:\t    1234 kB\nVmData:\t 1 kB\n"), Some(1234 * 1024));
        assert_eq!(rss_of("Name:\tx\n"), None);
    }
}
