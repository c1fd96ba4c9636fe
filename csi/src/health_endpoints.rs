//! The HTTP endpoints `/metrics`, `/healthz` and `/readyz`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use csi_wire::csi::GetPluginInfoRequest;
use csi_wire::csi::identity_client::IdentityClient;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tonic::transport::Endpoint;

use crate::blocking;
use crate::calls::Calls;
use crate::condition_checks::ConditionChecks;
use crate::socket::SocketPath;
use crate::storage::{Probe, Readiness, StorageMonitor};

/// The prefix of the metrics. csi/monitoring/README.md lists them.
const PREFIX: &str = "loopfs_csi";

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
    pub(crate) condition_checks: Arc<ConditionChecks>,
    pub(crate) calls: Calls,
    /// The driver's own sockets.
    pub(crate) sockets: Vec<SocketPath>,
    /// `true` once the kubelet has registered the driver. `None` if the driver does not register.
    pub(crate) registered: Option<watch::Receiver<bool>>,
}

impl service::HealthEndpoints for DriverHealthEndpoints {
    async fn metrics(&self) -> Result<Registry, String> {
        let mut registry = service::registry(PREFIX);
        self.calls.register(&mut registry);
        let (monitor, condition_checks) = (Arc::clone(&self.monitor), Arc::clone(&self.condition_checks));
        let registered = blocking::run(move || {
            // Findings about storage that is unavailable are out of date.
            if monitor.register(&mut registry) {
                condition_checks.register(&mut registry);
            }
            Ok(registry)
        });
        registered.await.map_err(|error| error.to_string())
    }

    /// Checks that a process serves calls on the sockets, even if its storage is unavailable. Also detects that a socket was removed. If
    /// another driver has replaced the socket, a restart would only replace it again.
    async fn liveness(&self) -> Result<(), String> {
        for socket in &self.sockets {
            require_response(&socket.path).await?;
        }
        Ok(())
    }

    /// Returns an error unless the sockets are those of this process, the storage is ready and the kubelet has registered the driver, or this
    /// node never had storage. No pod depends on the driver on such a node, and it must not delay the rollout to the nodes that have storage.
    async fn readiness(&self) -> Result<(), String> {
        if let Some(replaced) = self.sockets.iter().find(|socket| !socket.is_in_place()) {
            return Err(format!(
                "another process replaced {}: probably, a second driver runs on this node; stop one of them",
                replaced.path.display()
            ));
        }
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

/// Returns an error unless a driver responds on the socket.
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
