//! The registration socket of the CSI driver.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use csi::DriverName;
use csi_wire::registration::InfoRequest;
use csi_wire::registration::registration_client::RegistrationClient;
use tonic::transport::Endpoint;

/// The longest time for one call of the driver.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The driver's registration.
#[derive(Clone, Debug)]
pub(super) struct Registration {
    pub(super) driver: DriverName,
    pub(super) directory: PathBuf,
}

impl Registration {
    /// Asks the driver for its name, as the kubelet does.
    pub(super) async fn serving(&self) -> anyhow::Result<String> {
        let socket = self.directory.join(self.driver.registration_socket());
        let socket = socket.display();
        let endpoint = Endpoint::from_shared(format!("unix://{socket}"))?;
        let endpoint = endpoint.connect_timeout(CALL_TIMEOUT).timeout(CALL_TIMEOUT);
        let channel = endpoint.connect().await.with_context(|| {
            format!("connect to {socket}: the driver is not running, or its storage is unavailable")
        })?;
        let info = RegistrationClient::new(channel).get_info(InfoRequest {}).await;
        let info = info.with_context(|| format!("call GetInfo on {socket}"))?.into_inner();
        ensure!(info.name == self.driver.as_str(), "{socket} is served by another plugin, {:?}", info.name);
        Ok(format!("driver {} serves {}", self.driver, info.endpoint))
    }
}
