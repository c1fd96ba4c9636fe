//! The Controller service, for orchestrators without a provisioner for these volumes. It manages the volumes of this
//! node and their snapshots.

use std::collections::HashMap;

use csi_wire::csi as wire;
use csi_wire::csi::controller_server::Controller;
use csi_wire::csi::controller_service_capability::{self as capability, rpc::Type as Capability};
use csi_wire::csi::{controller_get_volume_response, list_snapshots_response};
use tonic::{Request, Response, Status, async_trait};

use super::rpc::{self, RpcKind, signed};
use crate::driver::DriverName;
use crate::driver::ThisNode;
use crate::error::Result;
use crate::locks::{LockMode, OperationObject};
use crate::request::{CapacityQuery, RequestReader};
use crate::volumes::{Capacity, MIN_VOLUME_SIZE, Page, SnapshotPage, VolumeOperations};

/// The capabilities of the Controller service in this version of the driver.
const CAPABILITIES: [Capability; 14] = [
    Capability::CreateDeleteVolume,
    Capability::CloneVolume,
    Capability::CreateDeleteSnapshot,
    Capability::ListSnapshots,
    Capability::GetSnapshot,
    Capability::ListVolumes,
    Capability::ListVolumesPublishedNodes,
    Capability::GetCapacity,
    Capability::ExpandVolume,
    Capability::GetVolume,
    Capability::VolumeCondition,
    Capability::GetVolumeHealth,
    Capability::ListVolumeHealth,
    Capability::SingleNodeMultiWriter,
];

#[derive(Debug)]
pub(crate) struct ControllerService {
    pub(super) filesystem_uuid_key: String,
    pub(super) node: ThisNode,
    requests: RequestReader,
    operations: VolumeOperations,
}

impl ControllerService {
    pub(crate) fn new(
        driver_name: &DriverName,
        node: ThisNode,
        requests: RequestReader,
        operations: VolumeOperations,
    ) -> Self {
        Self { filesystem_uuid_key: driver_name.filesystem_uuid_key(), node, requests, operations }
    }
}

#[async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<wire::CreateVolumeRequest>,
    ) -> Result<Response<wire::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("CreateVolume", RpcKind::Mutating, &request.name.clone(), async {
            let create = self.requests.create(request)?;
            let locks = [(create.volume.clone().into(), LockMode::Change)].into_iter();
            let locks = locks.chain(create.source.clone().map(|source| (source.into(), LockMode::Keep)));
            let created = self.operations.locked(locks, move |volumes| volumes.create(&create)).await?;
            Ok(wire::CreateVolumeResponse { volume: Some(self.volume(&created)) })
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<wire::DeleteVolumeRequest>,
    ) -> Result<Response<wire::DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("DeleteVolume", RpcKind::Mutating, &request.volume_id, async {
            if let Some(volume) = self.requests.delete(&request)? {
                let locks = [(volume.clone().into(), LockMode::Remove)];
                self.operations.locked(locks, move |volumes| volumes.delete(&volume, None)).await?;
            }
            Ok(wire::DeleteVolumeResponse {})
        })
        .await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<wire::ControllerExpandVolumeRequest>,
    ) -> Result<Response<wire::ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ControllerExpandVolume", RpcKind::Mutating, &request.volume_id.clone(), async {
            let expand = self.requests.controller_expand(request)?;
            let locks = [
                (OperationObject::Capacity(expand.volume.clone()), LockMode::Change),
                (expand.volume.clone().into(), LockMode::Keep),
            ];
            let expanded =
                self.operations.locked(locks, move |volumes| volumes.controller_expand(&expand)).await?;
            Ok(wire::ControllerExpandVolumeResponse {
                capacity_bytes: signed(expanded.volume.capacity().0),
                node_expansion_required: !expanded.devices_refreshed,
            })
        })
        .await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<wire::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<wire::ValidateVolumeCapabilitiesResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ValidateVolumeCapabilities", RpcKind::ReadOnly, &request.volume_id.clone(), async {
            let confirmed = wire::validate_volume_capabilities_response::Confirmed {
                volume_context: request.volume_context.clone(),
                volume_capabilities: request.volume_capabilities.clone(),
                parameters: request.parameters.clone(),
                mutable_parameters: HashMap::new(),
            };
            let validate = self.requests.validate(request)?;
            let validation = self.operations.unlocked(move |volumes| volumes.validate(&validate)).await?;
            Ok(match validation {
                Ok(()) => wire::ValidateVolumeCapabilitiesResponse {
                    confirmed: Some(confirmed),
                    message: String::new(),
                },
                Err(message) => wire::ValidateVolumeCapabilitiesResponse { confirmed: None, message },
            })
        })
        .await
    }

    async fn list_volumes(
        &self,
        request: Request<wire::ListVolumesRequest>,
    ) -> Result<Response<wire::ListVolumesResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ListVolumes", RpcKind::ReadOnly, "", async {
            let list = self.requests.list(request.max_entries, &request.starting_token)?;
            let Page { volumes, next } =
                self.operations.unlocked(move |volumes| volumes.list(&list, |_any| true)).await?;
            Ok(wire::ListVolumesResponse {
                entries: volumes.into_iter().map(|info| self.entry(info)).collect(),
                next_token: next.map(|token| token.to_string()).unwrap_or_default(),
            })
        })
        .await
    }

    async fn controller_get_volume(
        &self,
        request: Request<wire::ControllerGetVolumeRequest>,
    ) -> Result<Response<wire::ControllerGetVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ControllerGetVolume", RpcKind::ReadOnly, &request.volume_id, async {
            let volume = self.requests.volume(&request.volume_id)?;
            let info = self.operations.unlocked(move |volumes| volumes.get(&volume)).await?;
            Ok(wire::ControllerGetVolumeResponse {
                volume: Some(self.volume(&info)),
                status: Some(controller_get_volume_response::VolumeStatus {
                    published_node_ids: self.published_node_ids(&info),
                    volume_condition: Some(super::health::condition(info.condition)),
                }),
            })
        })
        .await
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<wire::ControllerListVolumeHealthRequest>,
    ) -> Result<Response<wire::ControllerListVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ControllerListVolumeHealth", RpcKind::ReadOnly, "", async {
            let list = self.requests.list(request.max_entries, &request.starting_token)?;
            let Page { volumes, next } =
                self.operations.unlocked(move |volumes| volumes.list_abnormal(&list)).await?;
            Ok(wire::ControllerListVolumeHealthResponse {
                entries: volumes.into_iter().map(wire::VolumeHealth::from).collect(),
                next_token: next.map(|token| token.to_string()).unwrap_or_default(),
            })
        })
        .await
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<wire::ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<wire::ControllerGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ControllerGetVolumeHealth", RpcKind::ReadOnly, &request.volume_id, async {
            let volume = self.requests.volume(&request.volume_id)?;
            let info = self.operations.unlocked(move |volumes| volumes.get(&volume)).await?;
            Ok(wire::ControllerGetVolumeHealthResponse { volume_health: Some(info.into()) })
        })
        .await
    }

    async fn get_capacity(
        &self,
        request: Request<wire::GetCapacityRequest>,
    ) -> Result<Response<wire::GetCapacityResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("GetCapacity", RpcKind::ReadOnly, "", async {
            let CapacityQuery { here, kind, parameters } = self.requests.capacity(request)?;
            let capacity = self
                .operations
                .unlocked(move |volumes| match here {
                    true => volumes.capacity(&parameters, kind),
                    false => volumes.verified().map(|_available| Capacity::NONE),
                })
                .await?;
            Ok(wire::GetCapacityResponse {
                available_capacity: signed(capacity.available.0),
                maximum_volume_size: Some(signed(capacity.largest.0)),
                minimum_volume_size: Some(signed(MIN_VOLUME_SIZE.0)),
            })
        })
        .await
    }

    async fn controller_get_capabilities(
        &self,
        _request: Request<wire::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<wire::ControllerGetCapabilitiesResponse>, Status> {
        let capability = |kind: Capability| wire::ControllerServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: kind as i32 })),
        };
        let capabilities = CAPABILITIES.map(capability).to_vec();
        Ok(Response::new(wire::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_publish_volume(
        &self,
        _request: Request<wire::ControllerPublishVolumeRequest>,
    ) -> Result<Response<wire::ControllerPublishVolumeResponse>, Status> {
        Err(unimplemented(
            "volumes are local to their node, so there is nothing to attach: PUBLISH_UNPUBLISH_VOLUME",
        ))
    }

    async fn controller_unpublish_volume(
        &self,
        _request: Request<wire::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<wire::ControllerUnpublishVolumeResponse>, Status> {
        Err(unimplemented(
            "volumes are local to their node, so there is nothing to attach: PUBLISH_UNPUBLISH_VOLUME",
        ))
    }

    async fn create_snapshot(
        &self,
        request: Request<wire::CreateSnapshotRequest>,
    ) -> Result<Response<wire::CreateSnapshotResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("CreateSnapshot", RpcKind::Mutating, &request.name.clone(), async {
            let create = self.requests.create_snapshot(request)?;
            let locks = [
                (create.snapshot.clone().into(), LockMode::Change),
                (create.source.clone().into(), LockMode::Keep),
            ];
            let created =
                self.operations.locked(locks, move |volumes| volumes.create_snapshot(&create)).await?;
            Ok(wire::CreateSnapshotResponse { snapshot: Some(self.snapshot(&created)) })
        })
        .await
    }

    async fn delete_snapshot(
        &self,
        request: Request<wire::DeleteSnapshotRequest>,
    ) -> Result<Response<wire::DeleteSnapshotResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("DeleteSnapshot", RpcKind::Mutating, &request.snapshot_id, async {
            if let Some(snapshot) = self.requests.delete_snapshot(&request)? {
                let locks = [(snapshot.clone().into(), LockMode::Remove)];
                self.operations.locked(locks, move |volumes| volumes.delete_snapshot(&snapshot)).await?;
            }
            Ok(wire::DeleteSnapshotResponse {})
        })
        .await
    }

    async fn list_snapshots(
        &self,
        request: Request<wire::ListSnapshotsRequest>,
    ) -> Result<Response<wire::ListSnapshotsResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ListSnapshots", RpcKind::ReadOnly, "", async {
            let list = self.requests.list_snapshots(&request)?;
            let SnapshotPage { snapshots, next } =
                self.operations.unlocked(move |volumes| volumes.list_snapshots(&list)).await?;
            let entry = |snapshot| list_snapshots_response::Entry { snapshot: Some(self.snapshot(snapshot)) };
            Ok(wire::ListSnapshotsResponse {
                entries: snapshots.iter().map(entry).collect(),
                next_token: next.map(|token| token.to_string()).unwrap_or_default(),
            })
        })
        .await
    }

    async fn get_snapshot(
        &self,
        request: Request<wire::GetSnapshotRequest>,
    ) -> Result<Response<wire::GetSnapshotResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("GetSnapshot", RpcKind::ReadOnly, &request.snapshot_id, async {
            let id = self.requests.get_snapshot(&request)?;
            let snapshot = self.operations.unlocked(move |volumes| volumes.snapshot(&id)).await?;
            Ok(wire::GetSnapshotResponse { snapshot: Some(self.snapshot(&snapshot)) })
        })
        .await
    }

    async fn controller_modify_volume(
        &self,
        _request: Request<wire::ControllerModifyVolumeRequest>,
    ) -> Result<Response<wire::ControllerModifyVolumeResponse>, Status> {
        Err(unimplemented("the parameters of a volume are fixed at its creation: MODIFY_VOLUME"))
    }
}

fn unimplemented(capability: &str) -> Status {
    Status::unimplemented(format!("{capability} is not a capability of this driver"))
}
