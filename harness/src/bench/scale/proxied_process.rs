//! A process whose connections to the API server go through a proxy that counts what the process receives.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::TempDir;
use testvm::process::{Process, Program};

use super::super::provision::peer;
use super::counting_proxy::CountingProxy;

/// The timeout of the start: the process receives all objects that it watches.
const START_TIMEOUT: Duration = Duration::from_secs(900);
const READY_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A running process. Dropping it kills the process.
pub(super) struct ProxiedProcess {
    /// What messages call the process.
    title: &'static str,
    /// The process is idle if it receives nothing for this time.
    quiet_time: Duration,
    process: Process,
    proxy: CountingProxy,
    /// Removed after the process, which has its files there.
    _directory: TempDir,
}

/// Returns the path of the kubeconfig in the directory of a process.
pub(super) fn kubeconfig_in(directory: &TempDir) -> PathBuf {
    directory.path().join(peer::KUBECONFIG)
}

impl ProxiedProcess {
    /// Starts `program`. Its directory becomes the owner of a copy of `kubeconfig` that names the proxy, at [`kubeconfig_in`].
    pub(super) async fn start(
        title: &'static str,
        quiet_time: Duration,
        directory: TempDir,
        kubeconfig: &str,
        program: Program,
    ) -> Result<ProxiedProcess> {
        let mut kubeconfig: Value = serde_json::from_str(kubeconfig).context("parse the kubeconfig")?;
        let proxy = CountingProxy::start(server_of(&kubeconfig)?).await?;
        redirect(&mut kubeconfig, proxy.address())?;
        let path = kubeconfig_in(&directory);
        std::fs::write(&path, kubeconfig.to_string()).with_context(|| format!("write {}", path.display()))?;
        let process = program.spawn()?;
        Ok(ProxiedProcess { title, quiet_time, process, proxy, _directory: directory })
    }

    /// Polls until `pending` returns `None`. It returns the reason as long as the process has not started.
    pub(super) async fn poll(&self, pending: impl AsyncFn() -> Option<String>) -> Result<()> {
        let started = Instant::now();
        while let Some(reason) = pending().await {
            if let Some(status) = self.process.try_wait() {
                anyhow::bail!("the {} ended with {status}", self.title);
            }
            anyhow::ensure!(
                started.elapsed() < START_TIMEOUT,
                "the {} has not started after {START_TIMEOUT:?}: {reason}",
                self.title
            );
            tokio::time::sleep(READY_POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Waits until it receives nothing, and returns the bytes that it has received from the API server since its start.
    pub(super) async fn until_idle(&self) -> Result<u64> {
        let received = self.proxy.until_quiet(self.quiet_time, START_TIMEOUT).await?;
        if let Some(status) = self.process.try_wait() {
            anyhow::bail!("the {} ended with {status}", self.title);
        }
        Ok(received)
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

    /// Stops the process, and kills it after `grace`.
    pub(super) async fn stop(self, grace: Duration) -> Result<ExitStatus> {
        self.process.stop(grace).await
    }
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

    #[test]
    fn a_redirected_kubeconfig_names_the_proxy() {
        let mut kubeconfig = json!({"clusters": [{"cluster": {"server": "https://127.0.0.1:21000"}}]});
        assert_eq!(server_of(&kubeconfig).unwrap(), "127.0.0.1:21000".parse().unwrap());
        let proxy = "127.0.0.1:9".parse().unwrap();
        redirect(&mut kubeconfig, proxy).unwrap();
        assert_eq!(server_of(&kubeconfig).unwrap(), proxy);
        assert!(server_of(&json!({})).is_err() && redirect(&mut json!({}), proxy).is_err());
    }

    #[test]
    fn the_resident_memory_is_in_bytes() {
        assert_eq!(rss_of("Name:\tx\nVmRSS:\t    1234 kB\nVmData:\t 1 kB\n"), Some(1234 * 1024));
        assert_eq!(rss_of("Name:\tx\n"), None);
    }
}
