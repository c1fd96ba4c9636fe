//! The Node service: stages and publishes the volumes of this node for the kubelet.

use std::sync::Arc;

use csi_wire::csi as wire;
use csi_wire::csi::node_get_storage_health_response::StorageBackendHealth;
use csi_wire::csi::node_server::Node;
use csi_wire::csi::node_service_capability as capability;
use csi_wire::csi::node_service_capability::rpc::Type as Capability;
use loopfs::loop_device::Access;
use loopfs::mount::MountFlags;
use loopfs::publish::{PublishMode, Publisher};
use loopfs::volume_store::{Volume, VolumeId, VolumeKind, VolumeStats};
use loopfs::{Bytes, FilesystemUuid, Inodes};
use tonic::{Request, Response, Status, async_trait};

use super::inventory::{self, require_kind};
use super::rpc::{self, RpcKind, VolumeOperations, Volumes, signed};
use super::unavailable;
use super::unpublish::Cleanups;
use crate::error::{Error, Result};
use crate::locks::LockMode;
use crate::request::{self, AccessType, CapacityRange, RequestReader, TargetPath, require_non_empty};
use crate::storage::{Probe, Readiness, require_filesystem};

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
    requests: RequestReader,
    operations: VolumeOperations,
    cleanups: Cleanups,
    probe: Arc<Probe>,
}

impl NodeService {
    pub(crate) fn new(requests: RequestReader, operations: VolumeOperations, probe: Arc<Probe>) -> Self {
        Self { requests, cleanups: Cleanups::new(operations.clone()), operations, probe }
    }
}

#[async_trait]
impl Node for NodeService {
    /// Attaches the device of a Block volume. Publishing does the same if it is necessary, because staging may not have
    /// survived a reboot and an orchestrator need not repeat it.
    async fn node_stage_volume(
        &self,
        request: Request<wire::NodeStageVolumeRequest>,
    ) -> Result<Response<wire::NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeStageVolume", RpcKind::Mutating, &request.volume_id.clone(), async {
            let (id, filesystem, capability) = self.requests.stage(request)?;
            let (locks, cleanups) = ([(id.clone().into(), LockMode::Change)], self.cleanups.clone());
            let work = move |volumes: &Volumes| {
                let publisher = volumes.monitor.verified()?;
                require_filesystem(&publisher, filesystem)?;
                match capability.access_type {
                    AccessType::Mount(_) => {
                        require_kind(&publisher.store().volume(&id)?, VolumeKind::Filesystem)?;
                    }
                    AccessType::Block if capability.read_only => publisher.attach(&id, Access::ReadOnly)?,
                    AccessType::Block => publisher.attach(&id, Access::ReadWrite)?,
                }
                cleanups.keep_devices(&id);
                Ok(())
            };
            self.operations.locked(locks, work).await?;
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
            let id = request::volume_id(&request.volume_id)?;
            self.requests.path("staging_target_path", &request.staging_target_path)?;
            self.cleanups.unstage(id).await?;
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
            let Publish { id, filesystem, target, mode, single_target } = self.requests.publish(request)?;
            let locks = [(id.clone().into(), LockMode::Change), ((&target).into(), LockMode::Change)];
            let cleanups = self.cleanups.clone();
            let work = move |volumes: &Volumes| {
                let publisher = volumes.monitor.verified()?;
                require_filesystem(&publisher, filesystem)?;
                match single_target {
                    true => publisher.publish_only_at(&id, target.relative(), mode)?,
                    false => publisher.publish(&id, target.relative(), mode)?,
                }
                cleanups.keep_devices(&id);
                Ok(())
            };
            self.operations.locked(locks, work).await?;
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
            let id = request::volume_id(&request.volume_id)?;
            let target = self.requests.path("target_path", &request.target_path)?;
            self.cleanups.unpublish(id, target).await?;
            Ok(wire::NodeUnpublishVolumeResponse {})
        })
        .await
    }

    /// Returns the use, capacity and condition of a volume that is published at the path of the request. This works while the storage
    /// is unavailable as well, because the condition tells the kubelet about that.
    async fn node_get_volume_stats(
        &self,
        request: Request<wire::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<wire::NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeGetVolumeStats", RpcKind::Quiet, &request.volume_id, async {
            let (id, path) = self.requests.volume_at(&request.volume_id, &request.volume_path)?;
            let work = move |volumes: &Volumes| {
                let target = match &path {
                    Some(path) => volumes.root.locate(path.relative())?,
                    None => None,
                };
                let stats = match (volumes.monitor.verified(), &target) {
                    (Ok(publisher), target) => publisher.stats_at(&id, target.as_ref())?,
                    (Err(Error::StorageUnavailable(reason)), Some(target)) => {
                        unavailable::stats(&id, target, volumes.monitor.devices(), reason)?
                    }
                    (Err(Error::StorageUnavailable(_)), None) => None,
                    (Err(error), _) => return Err(error),
                };
                stats.ok_or_else(|| not_published(&id, path.as_ref()))
            };
            self.operations.unlocked(work).await.map(stats_response)
        })
        .await
    }

    async fn node_get_volume_health(
        &self,
        request: Request<wire::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<wire::NodeGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeGetVolumeHealth", RpcKind::Quiet, &request.volume_id, async {
            let volume = request::volume_id(&request.volume_id)?;
            let info = self.operations.unlocked(move |volumes| volumes.get(&volume)).await?;
            Ok(wire::NodeGetVolumeHealthResponse { volume_health: Some(info.into()) })
        })
        .await
    }

    async fn node_get_storage_health(
        &self,
        _request: Request<wire::NodeGetStorageHealthRequest>,
    ) -> Result<Response<wire::NodeGetStorageHealthResponse>, Status> {
        rpc::traced("NodeGetStorageHealth", RpcKind::Quiet, "", async {
            let problem = match self.probe.health().await {
                Err(error @ Error::StorageUnavailable(_)) => Some(error),
                Ok(Readiness::Starting) => Some(Error::StorageStarting),
                Ok(Readiness::Absent(reason)) => Some(Error::StorageUnavailable(reason.to_string())),
                // A failure of the loop driver is no failure of the storage.
                Ok(Readiness::Ready) | Err(_) => None,
            };
            let message = |error: Error| StorageBackendHealth {
                status: wire::StorageHealthErrorType::StorageUnreachable.into(),
                reason: "DataDirectoryUnusable".to_owned(),
                message: error.to_string(),
                volume_capability: None,
            };
            let backend_health = problem.map(message).into_iter().collect();
            Ok(wire::NodeGetStorageHealthResponse { backend_health })
        })
        .await
    }

    /// Refreshes the size of the volume's loop devices, and returns the size that the volume has on this node. Does not
    /// expand the image or the quota: ControllerExpandVolume or the provisioner does.
    async fn node_expand_volume(
        &self,
        request: Request<wire::NodeExpandVolumeRequest>,
    ) -> Result<Response<wire::NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("NodeExpandVolume", RpcKind::Mutating, &request.volume_id.clone(), async {
            let (id, path) = self.requests.volume_at(&request.volume_id, &request.volume_path)?;
            // The driver keeps nothing at the staging path.
            let is_staging_path = request.volume_path == request.staging_target_path;
            let CapacityRange { required, limit } = CapacityRange::parse(request.capacity_range)?;
            let kind = request::kind_of(request.volume_capability)?;
            let locks = [(id.clone().into(), LockMode::Change)];
            let work = move |volumes: &Volumes| {
                let publisher = volumes.monitor.verified()?;
                let volume = publisher.store().volume(&id)?;
                if let Some(kind) = kind {
                    require_kind(&volume, kind)?;
                }
                if !is_staging_path {
                    require_published(&volume, &publisher, path.as_ref())?;
                }
                let size = publisher.refresh(&volume)?;
                match (required, limit) {
                    (Some(required), _) if size < required => Err(Error::Temporary(format!(
                        "volume {id} has {size} on this node, but {required} are required; expand the volume itself first"
                    ))),
                    (_, Some(limit)) if size > limit => Err(Error::OutOfRange(format!(
                        "volume {id} has {size} already, which is above the limit of {limit}"
                    ))),
                    _ => Ok(size),
                }
            };
            let size = self.operations.locked(locks, work).await?;
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
            node_id: self.requests.node.name().to_owned(),
            // No limit: the kubelet's limit of pods is reached before directories or loop devices run out.
            max_volumes_per_node: 0,
            accessible_topology: Some(self.requests.node.topology()),
        }))
    }
}

/// A request to publish a volume at a path.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Publish {
    id: VolumeId,
    filesystem: Option<FilesystemUuid>,
    target: TargetPath,
    mode: PublishMode,
    /// `true` if the volume may be published at one target only.
    single_target: bool,
}

impl RequestReader {
    pub(super) fn stage(
        &self,
        request: wire::NodeStageVolumeRequest,
    ) -> Result<(VolumeId, Option<FilesystemUuid>, request::Capability)> {
        let id = request::volume_id(&request.volume_id)?;
        // The driver keeps nothing at the staging path. An invalid path is an error all the same, because it indicates
        // a defect of the client.
        self.path("staging_target_path", &request.staging_target_path)?;
        let capability = request::Capability::parse(request.volume_capability)?;
        Ok((id, self.filesystem(&request.volume_context)?, capability))
    }

    /// Reads a request to publish a volume. The error is [`Error::Precondition`] if the volume was not staged, as the specification
    /// requires of a driver with the capability STAGE_UNSTAGE_VOLUME.
    pub(super) fn publish(&self, request: wire::NodePublishVolumeRequest) -> Result<Publish> {
        let id = request::volume_id(&request.volume_id)?;
        let target = self.path("target_path", &request.target_path)?;
        let capability = request::Capability::parse(request.volume_capability)?;
        if request.staging_target_path.is_empty() {
            return Err(Error::Precondition(
                "staging_target_path: must not be empty; stage the volume first (NodeStageVolume), and name its staging path"
                    .to_owned(),
            ));
        }
        self.path("staging_target_path", &request.staging_target_path)?;
        let read_only = request.readonly || capability.read_only;
        let mode = match capability.access_type {
            AccessType::Block if read_only => PublishMode::Device(Access::ReadOnly),
            AccessType::Block => PublishMode::Device(Access::ReadWrite),
            AccessType::Mount(flags) => {
                PublishMode::Directory(MountFlags { read_only: flags.read_only || read_only, ..flags })
            }
        };
        let filesystem = self.filesystem(&request.volume_context)?;
        Ok(Publish { id, filesystem, target, mode, single_target: capability.single_target })
    }

    /// Returns a volume, and the path at which the client expects it. The path is `None` if it is not below the kubelet directory, so
    /// that no volume can be published there.
    pub(super) fn volume_at(&self, id: &str, path: &str) -> Result<(VolumeId, Option<TargetPath>)> {
        let id = request::volume_id(id)?;
        require_non_empty("volume_path", path)?;
        Ok((id, self.path("volume_path", path).ok()))
    }
}

/// Returns an error unless the volume is published at this path, or is published and nothing is at the path.
///
/// The kubelet knows one path for each Block volume, that of the pod which mapped it last. After that pod has ended, the
/// kubelet still names its path while other pods of the node use the volume, and would repeat a call that fails.
fn require_published(volume: &Volume, publisher: &Publisher, path: Option<&TargetPath>) -> Result<()> {
    let refused = || not_published(volume.id(), path);
    let target = publisher.root().locate(path.ok_or_else(refused)?.relative())?;
    let is_there = match target {
        Some(target) => publisher.is_at(volume, &target)?,
        None => None,
    };
    let is_published = match is_there {
        Some(is_there) => is_there,
        None => publisher.published_at(volume)?.is_some(),
    };
    if is_published { Ok(()) } else { Err(refused()) }
}

/// Returns the error that a volume is not at the path of a request, which is `None` if it is not below the kubelet directory.
fn not_published(volume: &VolumeId, path: Option<&TargetPath>) -> Error {
    let path = path.map_or_else(
        || "the requested path, which is not below the kubelet directory".to_owned(),
        TargetPath::to_string,
    );
    Error::NotPublished(format!("volume {volume} is not published at {path}"))
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
        volume_condition: Some(inventory::condition(condition)),
    }
}

#[cfg(test)]
mod tests;
