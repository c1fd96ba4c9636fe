//! The registration socket of the CSI driver.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use csi::DriverName;
use csi_wire::registration::InfoRequest;
use csi_wire::registration::registration_client::RegistrationClient;
use tonic::transport::Endpoint;

use super::evaluation::Evaluation;

/// The longest time for one call of the driver.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The driver's registration.
#[derive(Clone, Debug)]
pub(super) struct Registration {
    pub(super) driver: DriverName,
    pub(super) directory: PathBuf,
}

impl Registration {
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join(self.driver.registration_socket())
    }

    /// Returns the reason if the socket does not exist. It may block on the disk.
    pub(super) fn absent(&self) -> anyhow::Result<Option<Evaluation>> {
        let socket = self.socket();
        let exists = socket.try_exists().with_context(|| format!("stat {}", socket.display()))?;
        Ok((!exists).then(|| {
            Evaluation::not_met(format!(
                "{} does not exist: the driver is not running, or its storage is unavailable",
                socket.display()
            ))
        }))
    }

    /// Asks the driver for its name, as the kubelet does.
    pub(super) async fn serving(&self) -> anyhow::Result<Evaluation> {
        let socket = self.socket();
        let context = || format!("call GetInfo on {}", socket.display());
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).with_context(context)?;
        let endpoint = endpoint.connect_timeout(CALL_TIMEOUT).timeout(CALL_TIMEOUT);
        let channel = endpoint.connect().await.with_context(context)?;
        let info = RegistrationClient::new(channel).get_info(InfoRequest {}).await.with_context(context)?;
        let info = info.into_inner();
        Ok(if info.name == self.driver.as_str() {
            Evaluation::met(format!("driver {} serves {}", self.driver, info.endpoint))
        } else {
            Evaluation::not_met(format!("{} is served by another plugin, {:?}", socket.display(), info.name))
        })
    }
}
