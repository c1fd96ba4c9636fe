//! The HTTP endpoints `/metrics`, `/healthz` and `/readyz`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use csi_wire::csi::GetPluginInfoRequest;
use csi_wire::csi::identity_client::IdentityClient;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tonic::transport::Endpoint;

use crate::audit::ConditionAudit;
use crate::blocking;
use crate::metrics::{self, Calls, DriverSample};
use crate::storage::{Probe, Readiness, StorageMonitor};

/// The maximum time of a call to the driver's own gRPC server.
const SELF_CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The kubelet registers a driver within a second after it has found the socket.
const NOT_REGISTERED: &str = "the kubelet has not registered the driver; check that --registration-dir is plugins_registry below the \
                              --root-dir of the kubelet, and read the log of the kubelet";

/// The content of the endpoints.
#[derive(Debug)]
pub(crate) struct DriverHealthEndpoints {
    pub(crate) monitor: Arc<StorageMonitor>,
    pub(crate) probe: Arc<Probe>,
    pub(crate) audit: Arc<ConditionAudit>,
    pub(crate) calls: Calls,
    /// The driver's own sockets.
    pub(crate) endpoints: [Option<PathBuf>; 2],
    /// `true` once the kubelet has registered the driver. `None` if the driver does not register.
    pub(crate) registered: Option<watch::Receiver<bool>>,
}

impl service::HealthEndpoints for DriverHealthEndpoints {
    async fn metrics(&self) -> Result<Registry, String> {
        let (monitor, findings) = (Arc::clone(&self.monitor), self.audit.findings());
        let sample = blocking::run(move || Ok(DriverSample::collect(&monitor, findings))).await;
        let sample = sample.map_err(|error| error.to_string())?;
        Ok(metrics::register(&self.calls, &sample))
    }

    /// Checks that the process serves calls, even if its storage is unavailable. The check uses the driver's own
    /// sockets, so it also detects that one was removed or replaced.
    async fn liveness(&self) -> Result<(), String> {
        for endpoint in self.endpoints.iter().flatten() {
            require_response(endpoint).await?;
        }
        Ok(())
    }

    /// Returns an error unless the storage is ready and the kubelet has registered the driver, or this node never had storage. No pod
    /// depends on the driver on such a node, and it must not delay the rollout to the nodes that have storage.
    async fn readiness(&self) -> Result<(), String> {
        match self.probe.health().await {
            Ok(Readiness::Ready)
                if self.registered.as_ref().is_some_and(|registered| !*registered.borrow()) =>
            {
                Err(NOT_REGISTERED.to_owned())
            }
            Ok(Readiness::Ready | Readiness::Absent(_)) => Ok(()),
            Ok(Readiness::Starting) => Err("the storage is being opened".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Returns an error unless the driver responds on its socket.
async fn require_response(endpoint: &Path) -> Result<(), String> {
    let name = async {
        let socket = Endpoint::try_from(format!("unix://{}", endpoint.display()))?;
        let mut identity = IdentityClient::new(socket.connect().await?);
        identity.get_plugin_info(GetPluginInfoRequest {}).await?;
        anyhow::Ok(())
    };
    let socket = endpoint.display();
    match tokio::time::timeout(SELF_CALL_TIMEOUT, name).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("the driver does not respond on {socket}: {error:#}")),
        Err(_elapsed) => Err(format!("the driver has not responded on {socket} for {SELF_CALL_TIMEOUT:?}")),
    }
}
