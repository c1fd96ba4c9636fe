//! The Identity service.

use std::sync::Arc;

use csi_wire::csi as wire;
use csi_wire::csi::identity_server::Identity;
use csi_wire::csi::plugin_capability::{self as capability, Type, service, volume_expansion};
use tonic::{Request, Response, Status, async_trait};

use super::rpc::{self, RpcKind};
use crate::driver::DriverName;
use crate::error::Result;
use crate::storage::{Probe, Readiness};

#[derive(Debug)]
pub(crate) struct IdentityService {
    pub(crate) driver_name: DriverName,
    pub(crate) probe: Arc<Probe>,
}

#[async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _request: Request<wire::GetPluginInfoRequest>,
    ) -> Result<Response<wire::GetPluginInfoResponse>, Status> {
        Ok(Response::new(wire::GetPluginInfoResponse {
            name: self.driver_name.to_string(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: std::collections::HashMap::new(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _request: Request<wire::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<wire::GetPluginCapabilitiesResponse>, Status> {
        let capabilities = [
            Type::Service(capability::Service { r#type: service::Type::ControllerService as i32 }),
            Type::Service(capability::Service {
                r#type: service::Type::VolumeAccessibilityConstraints as i32,
            }),
            // A snapshot is on the node of its volume.
            Type::Service(capability::Service {
                r#type: service::Type::SnapshotAccessibilityConstraints as i32,
            }),
            Type::VolumeExpansion(capability::VolumeExpansion {
                r#type: volume_expansion::Type::Online as i32,
            }),
        ];
        let capabilities = capabilities.map(|kind| wire::PluginCapability { r#type: Some(kind) }).to_vec();
        Ok(Response::new(wire::GetPluginCapabilitiesResponse { capabilities }))
    }

    /// Each call runs a probe, which writes to the file system and queries the loop driver.
    ///
    /// A node that never had storage is not ready, and that is no error: sidecars wait until the driver is ready, and end
    /// after an error. The calls that need storage return the reason.
    async fn probe(
        &self,
        _request: Request<wire::ProbeRequest>,
    ) -> Result<Response<wire::ProbeResponse>, Status> {
        rpc::traced("Probe", RpcKind::Quiet, "", async {
            let health = self.probe.health().await?;
            Ok(wire::ProbeResponse { ready: Some(health == Readiness::Ready) })
        })
        .await
    }
}
