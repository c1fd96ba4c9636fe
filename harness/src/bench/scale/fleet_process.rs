//! The process with the provisioners of all nodes, whose connections to the API server go through one proxy.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::TempDir;
use testvm::process::Process;
use testvm_cluster::ControlPlane;
use tokio::sync::Notify;

use super::super::in_memory::unless_ended;
use super::counting_proxy::CountingProxy;
use super::proxied_process::{redirect, server_of};
use crate::fake_nodes::{self, LiveTests};

/// The timeout of the start of all provisioners.
const START_TIMEOUT: Duration = Duration::from_secs(1800);
/// Limits the shutdown of all provisioners, which complete operations in progress.
const STOP_GRACE: Duration = Duration::from_secs(120);

/// A running process. Dropping it kills the process.
pub(super) struct FleetProcess {
    process: Process,
    proxy: CountingProxy,
    /// Removed after the process, which has its kubeconfigs there.
    _directory: TempDir,
}

impl FleetProcess {
    /// Starts the provisioners of `nodes` by `tests`, the program with the live tests, and waits until all are ready.
    pub(super) async fn start(
        tests: &Path,
        control_plane: &ControlPlane,
        kubeconfigs: &Path,
        nodes: &[String],
        log: &Path,
    ) -> Result<FleetProcess> {
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let proxy = redirect_all(kubeconfigs, nodes, directory.path()).await?;
        let ready = Arc::new(Notify::new());
        let on_line = {
            let ready = Arc::clone(&ready);
            move |line: &str| {
                if line == fake_nodes::FLEET_READY {
                    ready.notify_one();
                }
            }
        };
        let process = LiveTests::new(tests.to_owned(), control_plane, directory.path())
            .serving(fake_nodes::SERVE_FLEET)
            .log(log)
            .on_stderr_line(on_line)
            .spawn()?;
        let mut fleet = FleetProcess { process, proxy, _directory: directory };
        let started = tokio::time::timeout(
            START_TIMEOUT,
            fleet.while_it_runs(async {
                ready.notified().await;
                Ok(())
            }),
        );
        let started = started.await.unwrap_or_else(|_elapsed| {
            Err(anyhow::anyhow!("the provisioners are not ready after {START_TIMEOUT:?}"))
        });
        started.with_context(|| format!("see {}", log.display()))?;
        Ok(fleet)
    }

    /// Returns the number of bytes that all provisioners have received from the API server.
    pub(super) fn received(&self) -> u64 {
        self.proxy.received()
    }

    /// Returns the result of `work`, or an error if the process ends before.
    pub(super) async fn while_it_runs<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        unless_ended(&mut self.process, work).await
    }

    pub(super) async fn stop(self) -> Result<()> {
        let status = self.process.stop(STOP_GRACE).await?;
        anyhow::ensure!(status.success(), "the provisioners did not exit cleanly: {status}");
        Ok(())
    }
}

/// Starts a proxy of the API server, and writes kubeconfigs that name the proxy to the directory `to`.
async fn redirect_all(kubeconfigs: &Path, nodes: &[String], to: &Path) -> Result<CountingProxy> {
    let first = nodes.first().context("there is no node")?;
    let proxy = CountingProxy::start(server_of(&read(kubeconfigs, first)?)?).await?;
    for node in nodes {
        let mut kubeconfig = read(kubeconfigs, node)?;
        redirect(&mut kubeconfig, proxy.address())?;
        let path = fake_nodes::kubeconfig(to, node);
        std::fs::write(&path, kubeconfig.to_string()).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(proxy)
}

fn read(kubeconfigs: &Path, node: &str) -> Result<Value> {
    let path = fake_nodes::kubeconfig(kubeconfigs, node);
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn all_kubeconfigs_name_one_proxy() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let nodes = ["node-1", "node-2"].map(str::to_owned);
        for node in &nodes {
            let kubeconfig =
                json!({"clusters": [{"cluster": {"server": "https://127.0.0.1:9"}}], "user": node});
            std::fs::write(fake_nodes::kubeconfig(from.path(), node), kubeconfig.to_string()).unwrap();
        }
        let proxy = redirect_all(from.path(), &nodes, to.path()).await.unwrap();
        for node in &nodes {
            let kubeconfig = read(to.path(), node).unwrap();
            assert_eq!(server_of(&kubeconfig).unwrap(), proxy.address());
            assert_eq!(kubeconfig["user"], **node);
        }
        let error = redirect_all(from.path(), &["node-3".to_owned()], to.path()).await.unwrap_err();
        assert!(error.to_string().contains("node-3.kubeconfig"), "{error}");
    }
}
