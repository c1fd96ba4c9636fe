//! Serves a CSI controller that creates nothing: each call returns at once. `cargo harness bench burst` runs external-provisioner
//! beside it, and `cargo harness bench scale` external-resizer as well, so that the benchmarks measure the sidecars alone. For our
//! provisioner, it is the driver of a node that never had a file system for volumes.
//!
//! ```console
//! $ cargo bench -p csi --features bench --bench memory_controller -- /tmp/csi.sock peer.loopfs.dev node-a
//! ```
//!
//! It serves the calls of these programs until SIGTERM, and refuses the others.

use std::path::Path;
use std::process::ExitCode;

use csi::socket;
use csi_wire::csi::controller_server::{Controller, ControllerServer};
use csi_wire::csi::identity_server::{Identity, IdentityServer};
use csi_wire::csi::node_server::{Node, NodeServer};
use csi_wire::csi::{controller_service_capability as of_controller, plugin_capability as of_plugin};
use csi_wire::volumes::volumes_server::{Volumes, VolumesServer};
use csi_wire::{csi as wire, volumes};
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::codegen::BoxStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, async_trait};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;
type Answer<T> = Result<Response<T>, Status>;

/// A controller of one node without volumes.
#[derive(Clone)]
struct MemoryController {
    driver: String,
    topology: wire::Topology,
    node: String,
}

#[tokio::main]
async fn main() -> ExitCode {
    // Cargo itself adds the first of these arguments.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let result = match &args[..] {
        [socket, driver, node] => serve(Path::new(socket), MemoryController::new(driver, node)).await,
        _ => Err("give the SOCKET, the name of the DRIVER and that of the NODE".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(path: &Path, controller: MemoryController) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let (listener, _removed_on_drop) = socket::listen(path, socket::OF_ROOT)?;
    let serving = Server::builder()
        .add_service(IdentityServer::new(controller.clone()))
        .add_service(ControllerServer::new(controller.clone()))
        .add_service(VolumesServer::new(controller.clone()))
        .add_service(NodeServer::new(controller))
        .serve_with_incoming(UnixListenerStream::new(listener));
    // Clients keep their connections, so the end of the last connection is not awaited.
    tokio::select! {
        served = serving => Ok(served?),
        _ = terminate.recv() => Ok(()),
    }
}

impl MemoryController {
    fn new(driver: &str, node: &str) -> MemoryController {
        let segments = [(format!("topology.{driver}/node"), node.to_owned())].into();
        let topology = wire::Topology { segments };
        MemoryController { driver: driver.to_owned(), topology, node: node.to_owned() }
    }
}

#[async_trait]
impl Identity for MemoryController {
    async fn get_plugin_info(
        &self,
        _: Request<wire::GetPluginInfoRequest>,
    ) -> Answer<wire::GetPluginInfoResponse> {
        Ok(Response::new(wire::GetPluginInfoResponse {
            name: self.driver.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<wire::GetPluginCapabilitiesRequest>,
    ) -> Answer<wire::GetPluginCapabilitiesResponse> {
        use of_plugin::service::Type;
        let capabilities = [Type::ControllerService, Type::VolumeAccessibilityConstraints].map(|service| {
            let service = of_plugin::Service { r#type: service as i32 };
            wire::PluginCapability { r#type: Some(of_plugin::Type::Service(service)) }
        });
        Ok(Response::new(wire::GetPluginCapabilitiesResponse { capabilities: capabilities.to_vec() }))
    }

    async fn probe(&self, _: Request<wire::ProbeRequest>) -> Answer<wire::ProbeResponse> {
        Ok(Response::new(wire::ProbeResponse { ready: Some(true) }))
    }
}

#[async_trait]
impl Controller for MemoryController {
    async fn create_volume(
        &self,
        request: Request<wire::CreateVolumeRequest>,
    ) -> Answer<wire::CreateVolumeResponse> {
        let request = request.into_inner();
        let volume = wire::Volume {
            capacity_bytes: request.capacity_range.map_or(0, |range| range.required_bytes),
            volume_id: request.name,
            accessible_topology: vec![self.topology.clone()],
            ..Default::default()
        };
        Ok(Response::new(wire::CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        _: Request<wire::DeleteVolumeRequest>,
    ) -> Answer<wire::DeleteVolumeResponse> {
        Ok(Response::new(wire::DeleteVolumeResponse {}))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<wire::ControllerGetCapabilitiesRequest>,
    ) -> Answer<wire::ControllerGetCapabilitiesResponse> {
        use of_controller::rpc::Type;
        let capabilities = [Type::CreateDeleteVolume, Type::ExpandVolume].map(|rpc| {
            let rpc = of_controller::Rpc { r#type: rpc as i32 };
            wire::ControllerServiceCapability { r#type: Some(of_controller::Type::Rpc(rpc)) }
        });
        Ok(Response::new(wire::ControllerGetCapabilitiesResponse { capabilities: capabilities.to_vec() }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<wire::ControllerExpandVolumeRequest>,
    ) -> Answer<wire::ControllerExpandVolumeResponse> {
        let range = request.into_inner().capacity_range;
        Ok(Response::new(wire::ControllerExpandVolumeResponse {
            capacity_bytes: range.map_or(0, |range| range.required_bytes),
            node_expansion_required: false,
        }))
    }
}

#[async_trait]
impl Node for MemoryController {
    async fn node_get_info(&self, _: Request<wire::NodeGetInfoRequest>) -> Answer<wire::NodeGetInfoResponse> {
        Ok(Response::new(wire::NodeGetInfoResponse {
            node_id: self.node.clone(),
            accessible_topology: Some(self.topology.clone()),
            ..Default::default()
        }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<wire::NodeGetCapabilitiesRequest>,
    ) -> Answer<wire::NodeGetCapabilitiesResponse> {
        Ok(Response::new(wire::NodeGetCapabilitiesResponse::default()))
    }
}

fn no_storage() -> Status {
    Status::failed_precondition("this driver has no storage")
}

#[async_trait]
impl Volumes for MemoryController {
    type WatchStream = BoxStream<volumes::NodeState>;
    type ListStream = BoxStream<volumes::ListPage>;
    type ListForeignFilesStream = BoxStream<volumes::ForeignFiles>;

    async fn watch(&self, _: Request<volumes::WatchRequest>) -> Answer<Self::WatchStream> {
        let state = volumes::NodeState {
            storage: volumes::node_state::Storage::Absent as i32,
            reason: "this driver has no storage".to_owned(),
            ..Default::default()
        };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(state)).chain(tokio_stream::pending()))))
    }

    async fn create(&self, _: Request<volumes::CreateRequest>) -> Answer<volumes::CreateResponse> {
        Err(no_storage())
    }

    async fn expand(&self, _: Request<volumes::ExpandRequest>) -> Answer<volumes::ExpandResponse> {
        Err(no_storage())
    }

    async fn delete(&self, _: Request<volumes::DeleteRequest>) -> Answer<volumes::DeleteResponse> {
        Err(no_storage())
    }

    async fn confirm(&self, _: Request<volumes::ConfirmRequest>) -> Answer<volumes::ConfirmResponse> {
        Err(no_storage())
    }

    async fn list(&self, _: Request<volumes::ListRequest>) -> Answer<Self::ListStream> {
        Err(no_storage())
    }

    async fn capacity(&self, _: Request<volumes::CapacityRequest>) -> Answer<volumes::CapacityResponse> {
        Err(no_storage())
    }

    async fn take_custody(
        &self,
        _: Request<volumes::TakeCustodyRequest>,
    ) -> Answer<volumes::TakeCustodyResponse> {
        Err(no_storage())
    }

    async fn list_foreign_files(
        &self,
        _: Request<volumes::ListForeignFilesRequest>,
    ) -> Answer<Self::ListForeignFilesStream> {
        Err(no_storage())
    }
}
