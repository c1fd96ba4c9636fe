//! What is served over HTTP: `/metrics`, `/healthz` and `/readyz`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::registry::Registry;
use tonic::transport::Endpoint;

use crate::audit::Audit;
use crate::blocking;
use crate::metrics::{self, Calls, Sample};
use crate::proto::csi::GetPluginInfoRequest;
use crate::proto::csi::identity_client::IdentityClient;
use crate::storage::{Probe, Readiness, StorageMonitor};

/// How long the gRPC server may take to say its name.
const SELF_CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// What the pages say.
#[derive(Debug)]
pub(crate) struct Pages {
    pub(crate) monitor: Arc<StorageMonitor>,
    pub(crate) probe: Arc<Probe>,
    pub(crate) audit: Arc<Audit>,
    pub(crate) calls: Calls,
    /// The driver's own socket.
    pub(crate) endpoint: PathBuf,
}

impl monitoring::Pages for Pages {
    async fn metrics(&self) -> Result<Registry, String> {
        let (monitor, findings) = (Arc::clone(&self.monitor), self.audit.findings());
        let sample = blocking::run(move || Ok(Sample::collect(&monitor, findings))).await;
        let sample = sample.map_err(|error| error.to_string())?;
        Ok(metrics::register(&self.calls, &sample))
    }

    /// Whether the process does its work, be its storage usable or not: asked on its own socket, so that one that was
    /// removed or taken by another is noticed too.
    async fn alive(&self) -> Result<(), String> {
        let name = async {
            let socket = Endpoint::try_from(format!("unix://{}", self.endpoint.display()))?;
            let mut identity = IdentityClient::new(socket.connect().await?);
            identity.get_plugin_info(GetPluginInfoRequest {}).await?;
            anyhow::Ok(())
        };
        let socket = self.endpoint.display();
        match tokio::time::timeout(SELF_CALL_TIMEOUT, name).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("the driver does not answer on {socket}: {error:#}")),
            Err(_elapsed) => {
                Err(format!("the driver has not answered on {socket} for {SELF_CALL_TIMEOUT:?}"))
            }
        }
    }

    /// As Identity.Probe, except on a node that never had storage: the driver is not registered there and nothing waits for
    /// it, so it must not hold up the rollout to the nodes that have storage.
    async fn ready(&self) -> Result<(), String> {
        match self.probe.health().await {
            Ok(Readiness::Ready) => Ok(()),
            Ok(Readiness::Starting) => Err("the storage is being opened".to_owned()),
            Err(_) if self.monitor.is_absent() => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}
