//! A process under test, whose connections to the API server go through a proxy that counts what the process receives.

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

use super::super::metrics_page;
use super::counting_proxy::CountingProxy;
use crate::fake_nodes::SYSTEM;

pub(super) const DRIVER: &str = "csi.loopfs.dev";

/// The timeout of the start: the process receives all objects that it watches.
const START_TIMEOUT: Duration = Duration::from_secs(900);
const READY_POLL_INTERVAL: Duration = Duration::from_millis(200);
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Limits the shutdown of a process that completes operations in progress.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// A role of the program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Role {
    /// The first argument of the program.
    pub(super) name: &'static str,
    /// What messages call the process.
    pub(super) title: &'static str,
    /// The prefix of the names of its metrics.
    pub(super) metrics: &'static str,
    /// A process that receives nothing for this time is idle.
    pub(super) quiet_time: Duration,
}

/// The parts of a process's command line that all runs share.
pub(super) struct Installation<'a> {
    pub(super) program: PathBuf,
    pub(super) node: &'a str,
    /// The pod of the driver on the node, as which the process runs.
    pub(super) pod: Pod,
    /// The kubeconfig with the rights of that pod.
    pub(super) kubeconfig: PathBuf,
}

/// What a process does while nothing happens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    pub(super) requests_per_minute: f64,
    bytes_per_second: f64,
}

impl Idle {
    /// Returns the bytes of `received` that remain without those that an idle process receives in this time: bookmarks of its watches
    /// and responses to periodic requests.
    pub(super) fn without(&self, received: u64, time: Duration) -> f64 {
        (received as f64 - self.bytes_per_second * time.as_secs_f64()).max(0.0)
    }
}

/// A running process. Dropping it kills the process.
pub(super) struct MeasuredProcess {
    role: Role,
    process: Process,
    proxy: CountingProxy,
    endpoints: SocketAddr,
    /// Removed after the process, which has its files there.
    _directory: TempDir,
}

impl MeasuredProcess {
    /// Starts the process with the options that `complete` adds, and waits until it is ready. `complete` also receives an empty
    /// directory for the files of the process.
    pub(super) async fn start(
        role: Role,
        installation: &Installation<'_>,
        log: &Path,
        complete: impl FnOnce(Program, &Path) -> Program,
    ) -> Result<MeasuredProcess> {
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let text = std::fs::read_to_string(&installation.kubeconfig)
            .with_context(|| format!("read {}", installation.kubeconfig.display()))?;
        let mut kubeconfig: Value = serde_json::from_str(&text).context("parse the kubeconfig")?;
        let proxy = CountingProxy::start(server_of(&kubeconfig)?).await?;
        redirect(&mut kubeconfig, proxy.address())?;
        let path = directory.path().join("kubeconfig");
        std::fs::write(&path, kubeconfig.to_string()).with_context(|| format!("write {}", path.display()))?;
        let files = directory.path().join("files");
        std::fs::create_dir(&files).with_context(|| format!("create {}", files.display()))?;

        let endpoints = free_address()?;
        let program = Program::new(&installation.program)
            .args([role.name, "--driver-name", DRIVER, "--node-name", installation.node])
            .args(["--node-loss", "dry-run", "--metrics-address", &endpoints.to_string()])
            .arg("--kubeconfig")
            .arg(path)
            .env("POD_NAMESPACE", SYSTEM)
            .env("POD_NAME", installation.pod.name_any())
            .log(log);
        let process = complete(program, &files).spawn()?;
        let process = MeasuredProcess { role, process, proxy, endpoints, _directory: directory };
        process.until_ready().await.with_context(|| format!("see {}", log.display()))?;
        Ok(process)
    }

    /// Waits until its caches have all objects.
    pub(super) async fn until_ready(&self) -> Result<()> {
        let pending = async || match self.page("/readyz").await {
            Ok((200, _)) => None,
            Ok((status, reason)) => Some(format!("/readyz returns {status}: {reason}")),
            Err(error) => Some(format!("{error:#}")),
        };
        self.poll(pending).await
    }

    /// Waits until a metric without labels has this value.
    pub(super) async fn until_metric(&self, name: &str, expected: f64) -> Result<()> {
        let pending = async || match self.metric(name).await {
            Ok(value) if value == Some(expected) => None,
            Ok(value) => Some(format!("{name} is {value:?}, and not {expected}")),
            Err(error) => Some(format!("{error:#}")),
        };
        self.poll(pending).await
    }

    /// Polls until `pending` returns `None`. A process announces on its pages alone what it has done, and it listens a moment after
    /// its start.
    async fn poll(&self, pending: impl AsyncFn() -> Option<String>) -> Result<()> {
        let started = Instant::now();
        while let Some(reason) = pending().await {
            if let Some(status) = self.process.try_wait() {
                anyhow::bail!("the {} ended with {status}", self.role.title);
            }
            anyhow::ensure!(
                started.elapsed() < START_TIMEOUT,
                "the {} has not started after {START_TIMEOUT:?}: {reason}",
                self.role.title
            );
            tokio::time::sleep(READY_POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Waits until it receives nothing, and returns the bytes that it has received from the API server since its start.
    pub(super) async fn until_idle(&self) -> Result<u64> {
        self.proxy.until_quiet(self.role.quiet_time, START_TIMEOUT).await
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

    /// Returns the number of requests that it has sent to the API server since its start, apart from those for a resource of the
    /// name `except`.
    pub(super) async fn requests(&self, except: Option<&str>) -> Result<f64> {
        Ok(requests_in(&self.metrics().await?, self.role.metrics, except))
    }

    /// Observes the idle process for `time`.
    pub(super) async fn observe_idle(&self, time: Duration) -> Result<Idle> {
        let (requests, received, since) = (self.requests(None).await?, self.received(), Instant::now());
        tokio::time::sleep(time).await;
        let elapsed = since.elapsed().as_secs_f64();
        Ok(Idle {
            requests_per_minute: (self.requests(None).await? - requests) * 60.0 / elapsed,
            bytes_per_second: (self.received() - received) as f64 / elapsed,
        })
    }

    /// Returns the value of a metric without labels, or `None` if the process has no such metric.
    pub(super) async fn metric(&self, name: &str) -> Result<Option<f64>> {
        Ok(metrics_page::value(&self.metrics().await?, &format!("{}_{name}", self.role.metrics)))
    }

    pub(super) async fn stop(self) -> Result<()> {
        let status = self.process.stop(STOP_GRACE).await?;
        anyhow::ensure!(status.success(), "the {} did not exit cleanly: {status}", self.role.title);
        Ok(())
    }

    async fn metrics(&self) -> Result<String> {
        let (status, metrics) = self.page("/metrics").await?;
        anyhow::ensure!(status == 200, "/metrics returns {status}: {metrics}");
        Ok(metrics)
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

/// Returns an address of the loopback that is free now. Another process may take it, and the process then does not start.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("bind a port of the loopback")?;
    listener.local_addr().context("read the address of a socket")
}

const SERVER: &str = "/clusters/0/cluster/server";

/// Returns the address of the API server in a kubeconfig.
pub(super) fn server_of(kubeconfig: &Value) -> Result<SocketAddr> {
    let server =
        kubeconfig.pointer(SERVER).and_then(Value::as_str).and_then(|url| url.strip_prefix("https://"));
    let server = server.context("the kubeconfig names no server")?;
    server.parse().with_context(|| format!("parse the address {server}"))
}

/// Replaces the server's address. The certificate of the API server covers its IP address with any port.
pub(super) fn redirect(kubeconfig: &mut Value, proxy: SocketAddr) -> Result<()> {
    let server = kubeconfig.pointer_mut(SERVER).context("the kubeconfig names no server")?;
    *server = format!("https://{proxy}").into();
    Ok(())
}

fn parse_response(response: &str) -> Result<(u16, String)> {
    let (head, body) = response.split_once("\r\n\r\n").context("the response has no end of its head")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("the response has no status: {head}"))?, body.to_owned()))
}

/// Returns the sum of the reads and writes in a page of metrics whose names begin with `prefix`, apart from those of the resource
/// `except`.
fn requests_in(metrics: &str, prefix: &str, except: Option<&str>) -> f64 {
    let counters = ["reads", "writes"].map(|kind| format!("{prefix}_api_{kind}_total{{"));
    let excepted = except.map(|resource| format!("resource=\"{resource}\""));
    let lines = metrics.lines().filter(|line| counters.iter().any(|counter| line.starts_with(counter)));
    let lines = lines.filter(|line| excepted.as_ref().is_none_or(|excepted| !line.contains(excepted)));
    lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

/// Returns the bytes of a line such as `VmRSS:     1234 kB`.
fn rss_of(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    const METRICS: &str = "# TYPE loopfs_provisioner_api_reads counter\n\
                           loopfs_provisioner_api_reads_total{verb=\"list\",resource=\"nodes\",code=\"200\"} 3\n\
                           loopfs_provisioner_api_reads_total{verb=\"watch\",resource=\"nodes\",code=\"200\"} 4\n\
                           loopfs_provisioner_api_reads_total{verb=\"get\",resource=\"leases\",code=\"200\"} 1\n\
                           loopfs_provisioner_api_writes_total{verb=\"patch\",resource=\"nodes\",code=\"200\"} 5\n";

    #[rstest]
    #[case::all("loopfs_provisioner", None, 13.0)]
    #[case::without_those_of_a_resource("loopfs_provisioner", Some("leases"), 12.0)]
    #[case::a_resource_with_a_longer_name("loopfs_provisioner", Some("node"), 13.0)]
    #[case::of_another_role("loopfs_controller", None, 0.0)]
    fn reads_and_writes_are_requests(
        #[case] prefix: &str,
        #[case] except: Option<&str>,
        #[case] expected: f64,
    ) {
        assert_eq!(requests_in(METRICS, prefix, except), expected);
    }

    #[test]
    fn bytes_of_an_idle_process_are_subtracted() {
        let idle = Idle { requests_per_minute: 0.0, bytes_per_second: 10.0 };
        assert_eq!(idle.without(100, Duration::from_secs(3)), 70.0);
        assert_eq!(idle.without(20, Duration::from_secs(3)), 0.0, "fewer bytes than while nothing happened");
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
