//! A process of our program under test.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use testvm::process::Program;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::super::metrics_page;
use super::idle::Observed;
use super::proxied_process::{ProxiedProcess, kubeconfig_in};
use crate::fake_nodes::SYSTEM;

pub(super) const DRIVER: &str = "csi.loopfs.dev";

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

/// A running process. Dropping it kills the process.
pub(super) struct MeasuredProcess {
    role: Role,
    process: ProxiedProcess,
    endpoints: SocketAddr,
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
        let kubeconfig = std::fs::read_to_string(&installation.kubeconfig)
            .with_context(|| format!("read {}", installation.kubeconfig.display()))?;
        let files = directory.path().join("files");
        std::fs::create_dir(&files).with_context(|| format!("create {}", files.display()))?;

        let endpoints = free_address()?;
        let program = Program::new(&installation.program)
            .args([role.name, "--driver-name", DRIVER, "--node-name", installation.node])
            .args(["--node-loss", "dry-run", "--metrics-address", &endpoints.to_string()])
            .arg("--kubeconfig")
            .arg(kubeconfig_in(&directory))
            .env("POD_NAMESPACE", SYSTEM)
            .env("POD_NAME", installation.pod.name_any())
            .log(log);
        let program = complete(program, &files);
        let process =
            ProxiedProcess::start(role.title, role.quiet_time, directory, &kubeconfig, program).await?;
        let process = MeasuredProcess { role, process, endpoints };
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
        self.process.poll(pending).await
    }

    /// Waits until a metric without labels has this value.
    pub(super) async fn until_metric(&self, name: &str, expected: f64) -> Result<()> {
        let pending = async || match self.metric(name).await {
            Ok(value) if value == Some(expected) => None,
            Ok(value) => Some(format!("{name} is {value:?}, and not {expected}")),
            Err(error) => Some(format!("{error:#}")),
        };
        self.process.poll(pending).await
    }

    /// Waits until it receives nothing, and returns the bytes that it has received from the API server since its start.
    pub(super) async fn until_idle(&self) -> Result<u64> {
        self.process.until_idle().await
    }

    /// Returns the number of requests that it has sent to the API server since its start, apart from those for a resource of the
    /// name `except`.
    pub(super) async fn requests_except(&self, except: &str) -> Result<f64> {
        Ok(requests_in(&self.metrics().await?, self.role.metrics, Some(except)))
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

impl Observed for MeasuredProcess {
    fn process(&self) -> &ProxiedProcess {
        &self.process
    }

    async fn requests(&self) -> Result<f64> {
        Ok(requests_in(&self.metrics().await?, self.role.metrics, None))
    }
}

/// Returns an address of the loopback that is free now. Another process may take it, and the process then does not start.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("bind a port of the loopback")?;
    listener.local_addr().context("read the address of a socket")
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

#[cfg(test)]
mod tests {
    use rstest::rstest;

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
    fn a_response_has_a_status_and_a_body() {
        let parsed =
            parse_response("HTTP/1.0 503 Service Unavailable\r\nx: y\r\n\r\nnot yet\r\n\r\n").unwrap();
        assert_eq!(parsed, (503, "not yet\r\n\r\n".to_owned()));
        assert!(parse_response("").is_err());
    }
}
