//! The Node service: parses a request, runs the operation, and returns the response. An operation that changes a volume has
//! the volume locked; one that only reads has not.

use std::sync::Arc;

use csi_wire::csi as wire;
use csi_wire::csi::node_server::Node;
use csi_wire::csi::node_service_capability::{self as capability, rpc::Type as Capability};
use loopfs::volume_store::VolumeStats;
use loopfs::{Bytes, Inodes};
use tonic::{Request, Response, Status, async_trait};

use super::health;
use super::rpc::{self, RpcKind, signed};
use crate::driver::ThisNode;
use crate::error::{Error, Result};
use crate::request::RequestReader;
use crate::storage::{Probe, Readiness};
use crate::volumes::VolumeOperations;

/// The capabilities of the Node service in this version of the driver.
const CAPABILITIES: [Capability; 7] = [
    Capability::StageUnstageVolume,
    Capability::GetVolumeStats,
    Capability::ExpandVolume,
    Capability::VolumeCondition,
    Capability::SingleNodeMultiWriter,
    Capability::GetVolumeHealth,
    Capability::GetStorageHealth,
];

#[derive(Debug)]
pub(crate) struct NodeService {
    node: ThisNode,
    requests: RequestReader,
    operations: VolumeOperations,
    probe: Arc<Probe>,
}

impl NodeService {
    pub(crate) fn new(
        node: ThisNode,
        requests: RequestReader,
        operations: VolumeOperations,
        probe: Arc<Probe>,
    ) -> Self {
        Self { node, requests, operations, probe }
    }
}

#[async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<wire::NodeStageVolumeRequest>,
    ) -> Result<Response<wire::NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeStageVolume", RpcKind::Mutating, &request.volume_id.clone(), async {
            let stage = self.requests.stage(request)?;
            self.operations.stage(stage).await?;
            Ok(wire::NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<wire::NodeUnstageVolumeRequest>,
    ) -> Result<Response<wire::NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeUnstageVolume", RpcKind::Mutating, &request.volume_id, async {
            let unstage = self.requests.unstage(&request)?;
            self.operations.unstage(unstage).await?;
            Ok(wire::NodeUnstageVolumeResponse {})
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<wire::NodePublishVolumeRequest>,
    ) -> Result<Response<wire::NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodePublishVolume", RpcKind::Mutating, &request.volume_id.clone(), async {
            let publish = self.requests.publish(request)?;
            self.operations.publish(publish).await?;
            Ok(wire::NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<wire::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<wire::NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeUnpublishVolume", RpcKind::Mutating, &request.volume_id, async {
            let unpublish = self.requests.unpublish(&request)?;
            self.operations.unpublish(unpublish).await?;
            Ok(wire::NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<wire::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<wire::NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeGetVolumeStats", RpcKind::ReadOnly, &request.volume_id, async {
            let get_stats = self.requests.stats(&request)?;
            self.operations.unlocked(move |volumes| volumes.stats(&get_stats)).await.map(stats_response)
        })
        .await
    }

    async fn node_get_volume_health(
        &self,
        request: Request<wire::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<wire::NodeGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeGetVolumeHealth", RpcKind::ReadOnly, &request.volume_id, async {
            let volume = self.requests.volume(&request.volume_id)?;
            let info = self.operations.unlocked(move |volumes| volumes.get(&volume)).await?;
            Ok(wire::NodeGetVolumeHealthResponse { volume_health: Some(info.into()) })
        })
        .await
    }

    async fn node_get_storage_health(
        &self,
        _request: Request<wire::NodeGetStorageHealthRequest>,
    ) -> Result<Response<wire::NodeGetStorageHealthResponse>, Status> {
        rpc::traced("NodeGetStorageHealth", RpcKind::ReadOnly, "", async {
            let problem = match self.probe.health().await {
                Err(error @ Error::StorageUnavailable(_)) => Some(error.to_string()),
                Ok(Readiness::Starting) => Some(Error::StorageStarting.to_string()),
                Ok(Readiness::Absent(reason)) => {
                    Some(Error::StorageUnavailable(reason.to_string()).to_string())
                }
                // A failure of the loop driver is no failure of the storage.
                Ok(Readiness::Ready) | Err(_) => None,
            };
            Ok(wire::NodeGetStorageHealthResponse { backend_health: health::of_storage(problem) })
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        request: Request<wire::NodeExpandVolumeRequest>,
    ) -> Result<Response<wire::NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeExpandVolume", RpcKind::Mutating, &request.volume_id.clone(), async {
            let expand = self.requests.node_expand(request)?;
            let size = self
                .operations
                .exclusive(&expand.volume.clone(), move |volumes| volumes.node_expand(&expand))
                .await?;
            Ok(wire::NodeExpandVolumeResponse { capacity_bytes: signed(size.0) })
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _request: Request<wire::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<wire::NodeGetCapabilitiesResponse>, Status> {
        let capability = |kind: Capability| wire::NodeServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: kind as i32 })),
        };
        let capabilities = CAPABILITIES.map(capability).to_vec();
        Ok(Response::new(wire::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _request: Request<wire::NodeGetInfoRequest>,
    ) -> Result<Response<wire::NodeGetInfoResponse>, Status> {
        Ok(Response::new(wire::NodeGetInfoResponse {
            node_id: self.node.name().to_owned(),
            // No limit: the kubelet's limit of pods is reached before directories or loop devices run out.
            max_volumes_per_node: 0,
            accessible_topology: Some(self.node.topology()),
        }))
    }
}

fn stats_response(stats: VolumeStats) -> wire::NodeGetVolumeStatsResponse {
    use wire::volume_usage::Unit;
    let usage = |unit: Unit, total: u64, used: u64, available: u64| wire::VolumeUsage {
        unit: unit as i32,
        total: signed(total),
        used: signed(used),
        available: signed(available),
    };
    let VolumeStats {
        capacity: Bytes(total),
        used: Bytes(used),
        available: Bytes(available),
        inodes,
        condition,
        ..
    } = stats;
    let inodes = inodes.map(|inodes| {
        let (Inodes(total), Inodes(used), Inodes(free)) = (inodes.total, inodes.used, inodes.free);
        usage(Unit::Inodes, total, used, free)
    });
    wire::NodeGetVolumeStatsResponse {
        usage: [usage(Unit::Bytes, total, used, available)].into_iter().chain(inodes).collect(),
        volume_condition: Some(super::health::condition(condition)),
    }
}
