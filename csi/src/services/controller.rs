//! The Controller service, for orchestrators without a provisioner for these volumes. It manages the volumes of this
//! node and their snapshots.

use std::collections::HashMap;
use std::sync::Arc;

use csi_wire::csi::controller_server::Controller;
use csi_wire::csi::controller_service_capability::rpc::Type as Capability;
use csi_wire::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use csi_wire::csi::{
    controller_get_volume_response, controller_service_capability as capability, list_snapshots_response,
    list_volumes_response,
};
use csi_wire::{Settings, csi as wire, reserved};
use loopfs::publish::Publisher;
use loopfs::volume_store::{
    Annotations, ContentSource, OwnedContentSource, SnapshotId, Volume, VolumeId, VolumeKind, VolumeSpec,
};
use loopfs::{Bytes, ErrorKind, FilesystemUuid};
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status, async_trait};

use super::inventory::{self, Page, VolumeInfo, require_kind};
use super::rpc::{self, RpcKind, VolumeOperations, Volumes, found, signed};
use super::snapshots::{self, Filter};
use crate::error::{Error, InvalidRequest, Result};
use crate::locks::{LockMode, OperationObject};
use crate::request::{self, CapacityRange, ListRequest, RequestReader, deleted_id, existing_id};
use crate::storage::require_filesystem;

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

/// The sizes of volumes are multiples of this size, which is also the minimum.
const UNIT: Bytes = Bytes(4096);

/// The size of a new volume if the request names none.
const DEFAULT_SIZE: Bytes = Bytes::GIB;

const VOLUME_CAPABILITIES: &str = "volume_capabilities";

/// The number of copies at the same time. It leaves most threads to other calls.
const MAX_COPIES: usize = 8;

const NOTHING_TO_ATTACH: &str =
    "volumes are local to their node, so there is nothing to attach: PUBLISH_UNPUBLISH_VOLUME";

#[derive(Debug)]
pub(crate) struct ControllerService {
    requests: RequestReader,
    operations: VolumeOperations,
    copies: Arc<Semaphore>,
}

#[async_trait]
impl Controller for ControllerService {
    /// Creates a volume, or returns the existing one if it has the requested properties.
    async fn create_volume(
        &self,
        request: Request<wire::CreateVolumeRequest>,
    ) -> Result<Response<wire::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("CreateVolume", RpcKind::Mutating, &request.name.clone(), async {
            let create = self.requests.create(request)?;
            let locks = [(create.volume.clone().into(), LockMode::Change)].into_iter();
            let locks = locks.chain(create.source.clone().map(|source| (source.into(), LockMode::Keep)));
            let is_copy = create.source.is_some();
            let work = move |volumes: &Volumes, is_wanted: &dyn Fn() -> bool| {
                let publisher = volumes.monitor.verified()?;
                let size = match found(publisher.store().volume(&create.volume))? {
                    Some(volume) => {
                        require_compatible(&volume, &create)?;
                        volume.capacity()
                    }
                    None => match &create.source {
                        Some(source) => {
                            copied_size(create.capacity, source_size(&publisher, create.kind, source)?)?
                        }
                        None => new_size(create.capacity)?,
                    },
                };
                // This call is repeated for an existing volume: the process that created it may have died before the volume
                // was durable.
                let volume = create_volume(&publisher, &create, size, is_wanted)?;
                require_compatible(&volume, &create)?;
                volumes.changes.space();
                Ok(VolumeInfo {
                    volume: volume.id().clone(),
                    capacity: Some(volume.capacity()),
                    filesystem: Some(publisher.store().filesystem_uuid()),
                    published: false,
                    condition: volume.stats()?.condition,
                    source: volume.source()?,
                })
            };
            let created = match is_copy {
                true => self.copying(locks, work).await?,
                false => self.operations.locked(locks, move |volumes| work(volumes, &|| true)).await?,
            };
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
            if let Some(volume) = deleted_id::<VolumeId>("volume_id", &request.volume_id)? {
                let locks = [(volume.clone().into(), LockMode::Remove)];
                self.operations.locked(locks, move |volumes| delete(volumes, &volume, None, || true)).await?;
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
            let (id, CapacityRange { required, limit }, kind) = self.requests.controller_expand(request)?;
            // The kubelet's calls for the volume continue in the meantime.
            let locks = [
                (OperationObject::Capacity(id.clone()), LockMode::Change),
                (id.clone().into(), LockMode::Keep),
            ];
            let work = move |volumes: &Volumes| {
                let publisher = volumes.monitor.verified()?;
                let volume = publisher.store().volume(&id)?;
                if let Some(kind) = kind {
                    require_kind(&volume, kind)?;
                }
                let (capacity, devices_refreshed) = match required {
                    Some(required) => expand(volumes, &id, size_within(required, limit)?, None)?,
                    None => (volume.capacity(), is_refreshed(&publisher, &volume)),
                };
                match limit {
                    Some(limit) if capacity > limit => Err(Error::OutOfRange(format!(
                        "volume {id} has {capacity} already, which is above the limit of {limit}"
                    ))),
                    _ => Ok((capacity, devices_refreshed)),
                }
            };
            let (capacity, devices_refreshed) = self.operations.locked(locks, work).await?;
            Ok(wire::ControllerExpandVolumeResponse {
                capacity_bytes: signed(capacity.0),
                node_expansion_required: !devices_refreshed,
            })
        })
        .await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<wire::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<wire::ValidateVolumeCapabilitiesResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ValidateVolumeCapabilities", RpcKind::Quiet, &request.volume_id.clone(), async {
            let confirmed = wire::validate_volume_capabilities_response::Confirmed {
                volume_context: request.volume_context.clone(),
                volume_capabilities: request.volume_capabilities.clone(),
                parameters: request.parameters.clone(),
                mutable_parameters: HashMap::new(),
            };
            let (id, expected) = self.requests.validate(request)?;
            let work = move |volumes: &Volumes| {
                let publisher = volumes.monitor.verified()?;
                let volume = publisher.store().volume(&id)?;
                match &expected {
                    Ok(expected) => first_difference(&publisher, &volume, expected),
                    Err(impossible) => Ok(Some(impossible.to_string())),
                }
            };
            Ok(match self.operations.unlocked(work).await? {
                None => wire::ValidateVolumeCapabilitiesResponse {
                    confirmed: Some(confirmed),
                    message: String::new(),
                },
                Some(message) => wire::ValidateVolumeCapabilitiesResponse { confirmed: None, message },
            })
        })
        .await
    }

    async fn list_volumes(
        &self,
        request: Request<wire::ListVolumesRequest>,
    ) -> Result<Response<wire::ListVolumesResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ListVolumes", RpcKind::Quiet, "", async {
            let list = ListRequest::parse(request.max_entries, &request.starting_token)?;
            let Page { items, next_token } =
                self.operations.unlocked(move |volumes| volumes.list(&list, |_any| true)).await?;
            let entry = |info: VolumeInfo| list_volumes_response::Entry {
                volume: Some(self.volume(&info)),
                status: Some(list_volumes_response::VolumeStatus {
                    published_node_ids: self.published_node_ids(&info),
                    volume_condition: Some(inventory::condition(info.condition)),
                }),
            };
            Ok(wire::ListVolumesResponse { entries: items.into_iter().map(entry).collect(), next_token })
        })
        .await
    }

    async fn controller_get_volume(
        &self,
        request: Request<wire::ControllerGetVolumeRequest>,
    ) -> Result<Response<wire::ControllerGetVolumeResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ControllerGetVolume", RpcKind::Quiet, &request.volume_id, async {
            let volume = request::volume_id(&request.volume_id)?;
            let info = self.operations.unlocked(move |volumes| volumes.get(&volume)).await?;
            Ok(wire::ControllerGetVolumeResponse {
                volume: Some(self.volume(&info)),
                status: Some(controller_get_volume_response::VolumeStatus {
                    published_node_ids: self.published_node_ids(&info),
                    volume_condition: Some(inventory::condition(info.condition)),
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
        rpc::traced("ControllerListVolumeHealth", RpcKind::Quiet, "", async {
            let list = ListRequest::parse(request.max_entries, &request.starting_token)?;
            let Page { items, next_token } =
                self.operations.unlocked(move |volumes| volumes.list_abnormal(&list)).await?;
            let entries = items.into_iter().map(wire::VolumeHealth::from).collect();
            Ok(wire::ControllerListVolumeHealthResponse { entries, next_token })
        })
        .await
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<wire::ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<wire::ControllerGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("ControllerGetVolumeHealth", RpcKind::Quiet, &request.volume_id, async {
            let volume = request::volume_id(&request.volume_id)?;
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
        rpc::traced("GetCapacity", RpcKind::Quiet, "", async {
            let (is_here, kind, settings) = self.requests.capacity(request)?;
            let work = move |volumes: &Volumes| match is_here {
                true => capacity(volumes, &settings, kind),
                false => volumes.monitor.verified().map(|_available| Capacity::default()),
            };
            let Capacity { available, largest } = self.operations.unlocked(work).await?;
            Ok(wire::GetCapacityResponse {
                available_capacity: signed(available.0),
                maximum_volume_size: Some(signed(largest.0)),
                minimum_volume_size: Some(signed(UNIT.0)),
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
        Err(unimplemented(NOTHING_TO_ATTACH))
    }

    async fn controller_unpublish_volume(
        &self,
        _request: Request<wire::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<wire::ControllerUnpublishVolumeResponse>, Status> {
        Err(unimplemented(NOTHING_TO_ATTACH))
    }

    async fn controller_modify_volume(
        &self,
        _request: Request<wire::ControllerModifyVolumeRequest>,
    ) -> Result<Response<wire::ControllerModifyVolumeResponse>, Status> {
        Err(unimplemented("the parameters of a volume are fixed at its creation: MODIFY_VOLUME"))
    }

    async fn create_snapshot(
        &self,
        request: Request<wire::CreateSnapshotRequest>,
    ) -> Result<Response<wire::CreateSnapshotResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("CreateSnapshot", RpcKind::Mutating, &request.name.clone(), async {
            let (id, source, is_accessible) = self.requests.create_snapshot(request)?;
            let locks = [(id.clone().into(), LockMode::Change), (source.clone().into(), LockMode::Keep)];
            let work = move |volumes: &Volumes, is_wanted: &dyn Fn() -> bool| {
                volumes.create_snapshot(&id, &source, is_accessible, is_wanted)
            };
            let created = self.copying(locks, work).await?;
            let snapshot = Some(snapshots::message(&created, &self.requests.node));
            Ok(wire::CreateSnapshotResponse { snapshot })
        })
        .await
    }

    async fn delete_snapshot(
        &self,
        request: Request<wire::DeleteSnapshotRequest>,
    ) -> Result<Response<wire::DeleteSnapshotResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("DeleteSnapshot", RpcKind::Mutating, &request.snapshot_id, async {
            if let Some(snapshot) = deleted_id::<SnapshotId>("snapshot_id", &request.snapshot_id)? {
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
        rpc::traced("ListSnapshots", RpcKind::Quiet, "", async {
            let list = ListRequest::parse(request.max_entries, &request.starting_token)?;
            let filter = Filter::parse(&request.snapshot_id, &request.source_volume_id);
            let work = move |volumes: &Volumes| volumes.list_snapshots(&list, filter.as_ref());
            let Page { items, next_token } = self.operations.unlocked(work).await?;
            let entry = |snapshot| list_snapshots_response::Entry {
                snapshot: Some(snapshots::message(snapshot, &self.requests.node)),
            };
            Ok(wire::ListSnapshotsResponse { entries: items.iter().map(entry).collect(), next_token })
        })
        .await
    }

    async fn get_snapshot(
        &self,
        request: Request<wire::GetSnapshotRequest>,
    ) -> Result<Response<wire::GetSnapshotResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("GetSnapshot", RpcKind::Quiet, &request.snapshot_id, async {
            let id: SnapshotId = existing_id("snapshot_id", "snapshot", &request.snapshot_id)?;
            let found = self.operations.unlocked(move |volumes| volumes.snapshot(&id)).await?;
            let snapshot = Some(snapshots::message(&found, &self.requests.node));
            Ok(wire::GetSnapshotResponse { snapshot })
        })
        .await
    }
}

fn unimplemented(capability: &str) -> Status {
    Status::unimplemented(format!("{capability} is not a capability of this driver"))
}

impl ControllerService {
    pub(crate) fn new(requests: RequestReader, operations: VolumeOperations) -> Self {
        Self { requests, operations, copies: Arc::new(Semaphore::new(MAX_COPIES)) }
    }

    /// Runs a copy under these locks, when fewer than [`MAX_COPIES`] others run. A call that waits for that has no lock and no thread.
    async fn copying<T: Send + 'static>(
        &self,
        wanted: impl IntoIterator<Item = (OperationObject, LockMode)>,
        work: impl FnOnce(&Volumes, &dyn Fn() -> bool) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        // An error would mean that the semaphore is closed, and it is never closed.
        let copy = Arc::clone(&self.copies).acquire_owned().await;
        let work = move |volumes: &Volumes, is_wanted: &dyn Fn() -> bool| {
            let _copy = copy;
            work(volumes, is_wanted)
        };
        self.operations.copying(wanted, work).await
    }

    /// Returns the message about a volume.
    fn volume(&self, info: &VolumeInfo) -> wire::Volume {
        let content_source = |source: &OwnedContentSource| {
            let source = match source {
                OwnedContentSource::Volume(id) => Type::Volume(VolumeSource { volume_id: id.to_string() }),
                OwnedContentSource::Snapshot(id) => {
                    Type::Snapshot(SnapshotSource { snapshot_id: id.to_string() })
                }
            };
            wire::VolumeContentSource { r#type: Some(source) }
        };
        let uuid = info.filesystem.map(|uuid| (self.requests.filesystem_uuid_key.clone(), uuid.to_string()));
        wire::Volume {
            capacity_bytes: info.capacity.map_or(0, |Bytes(capacity)| signed(capacity)),
            volume_id: info.volume.to_string(),
            volume_context: uuid.into_iter().collect(),
            content_source: info.source.as_ref().map(content_source),
            accessible_topology: vec![self.requests.node.topology()],
        }
    }

    fn published_node_ids(&self, info: &VolumeInfo) -> Vec<String> {
        info.published.then(|| self.requests.node.name().to_owned()).into_iter().collect()
    }
}

/// A request to create a volume.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Create {
    volume: VolumeId,
    kind: VolumeKind,
    capacity: CapacityRange,
    parameters: Settings,
    annotations: Annotations,
    /// The source of the volume's initial content.
    source: Option<OwnedContentSource>,
    /// `true` if a volume on this node satisfies the request.
    accessible_here: bool,
}

/// The properties that a client expects of a volume.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExpectedProperties {
    kind: VolumeKind,
    filesystem: Option<FilesystemUuid>,
    /// `None` if the request contains no parameters.
    parameters: Option<Settings>,
}

impl RequestReader {
    pub(super) fn create(&self, request: wire::CreateVolumeRequest) -> Result<Create> {
        let volume = request::id_of_name(&request.name)?;
        let kind = kind_of_all(request.volume_capabilities)?;
        let capacity = CapacityRange::parse(request.capacity_range)?;
        let parameters = settings(&request.parameters)?;
        let claim = reserved::claim_of(&request.parameters).map(|claim| (reserved::CLAIM_ANNOTATION, claim));
        let annotations =
            Annotations::new(claim).map_err(|error| InvalidRequest::new("parameters", error.to_string()))?;
        refuse_mutable(&request.mutable_parameters)?;
        let source = request.volume_content_source.map(content_source).transpose()?;
        let accessible_here = self.is_accessible(request.accessibility_requirements);
        Ok(Create { volume, kind, capacity, parameters, annotations, source, accessible_here })
    }

    /// Returns the volume, and the expected properties or the reason why no volume can have them.
    pub(super) fn validate(
        &self,
        request: wire::ValidateVolumeCapabilitiesRequest,
    ) -> Result<(VolumeId, Result<ExpectedProperties, InvalidRequest>)> {
        let volume = request::volume_id(&request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(no_capabilities().into());
        }
        let expected = || {
            refuse_mutable(&request.mutable_parameters)?;
            Ok(ExpectedProperties {
                kind: kind_of_all(request.volume_capabilities)?,
                filesystem: self.filesystem(&request.volume_context)?,
                parameters: (!request.parameters.is_empty())
                    .then(|| settings(&request.parameters))
                    .transpose()?,
            })
        };
        Ok((volume, expected()))
    }

    /// Returns `true` if the request is about this node, the kind of the volume unless the request names no capability, and the settings.
    pub(super) fn capacity(
        &self,
        request: wire::GetCapacityRequest,
    ) -> Result<(bool, Option<VolumeKind>, Settings)> {
        let kind = match request.volume_capabilities {
            capabilities if capabilities.is_empty() => None,
            capabilities => Some(kind_of_all(capabilities)?),
        };
        let parameters = settings(&request.parameters)?;
        let is_here = request.accessible_topology.is_none_or(|topology| self.node.lies_in(&topology));
        Ok((is_here, kind, parameters))
    }

    /// Returns the volume to expand, its requested size, and its kind if the request has a capability.
    pub(super) fn controller_expand(
        &self,
        request: wire::ControllerExpandVolumeRequest,
    ) -> Result<(VolumeId, CapacityRange, Option<VolumeKind>)> {
        let volume = request::volume_id(&request.volume_id)?;
        let capacity = CapacityRange::parse(request.capacity_range)?;
        if capacity == CapacityRange::default() {
            let problem = "must contain required_bytes, limit_bytes or both";
            return Err(InvalidRequest::new("capacity_range", problem).into());
        }
        Ok((volume, capacity, request::kind_of(request.volume_capability)?))
    }
}

fn content_source(source: wire::VolumeContentSource) -> Result<OwnedContentSource> {
    const FIELD: &str = "volume_content_source";
    match source.r#type {
        Some(Type::Volume(VolumeSource { volume_id })) => {
            existing_id(FIELD, "volume", &volume_id).map(OwnedContentSource::Volume)
        }
        Some(Type::Snapshot(SnapshotSource { snapshot_id })) => {
            existing_id(FIELD, "snapshot", &snapshot_id).map(OwnedContentSource::Snapshot)
        }
        None => Err(InvalidRequest::new(FIELD, "must name a volume or a snapshot").into()),
    }
}

/// Returns the one kind of volume that has all these capabilities.
fn kind_of_all(capabilities: Vec<wire::VolumeCapability>) -> Result<VolumeKind, InvalidRequest> {
    let kinds = capabilities
        .into_iter()
        .map(|capability| Ok(request::Capability::parse(Some(capability))?.access_type.kind()))
        .collect::<Result<Vec<_>, _>>()?;
    match kinds.as_slice() {
        [] => Err(no_capabilities()),
        [kind, others @ ..] if others.iter().all(|other| other == kind) => Ok(*kind),
        _ => Err(InvalidRequest::new(
            VOLUME_CAPABILITIES,
            "block and mount access are both requested, but a volume is either a device or a directory",
        )),
    }
}

fn no_capabilities() -> InvalidRequest {
    InvalidRequest::new(VOLUME_CAPABILITIES, "must not be empty")
}

fn settings(parameters: &HashMap<String, String>) -> Result<Settings, InvalidRequest> {
    Settings::parse(parameters, reserved::of_volume, &[])
        .map_err(|error| InvalidRequest::new("parameters", error.to_string()))
}

fn refuse_mutable(parameters: &HashMap<String, String>) -> Result<(), InvalidRequest> {
    if parameters.is_empty() {
        return Ok(());
    }
    Err(InvalidRequest::new(
        "mutable_parameters",
        "the parameters of a volume are fixed at its creation; use parameters",
    ))
}

/// The result of a capacity query. The default is that of volumes which cannot be on this node.
#[derive(Debug, Default)]
pub(super) struct Capacity {
    /// Bytes that no volume has reserved.
    pub(super) available: Bytes,
    /// The capacity of the largest volume that can be created.
    pub(super) largest: Bytes,
}

/// Returns the free capacity of this node, and the size of the largest volume with these settings that fits into it.
pub(super) fn capacity(volumes: &Volumes, settings: &Settings, kind: Option<VolumeKind>) -> Result<Capacity> {
    let space = volumes.monitor.verified()?.store().space()?;
    let spec = |kind| settings.spec(kind, Bytes(0));
    let largest = match kind {
        Some(kind) => space.largest_volume(&spec(kind)),
        None => space.largest_volume_of_any_kind(&spec(VolumeKind::Filesystem)),
    };
    Ok(Capacity { available: whole_units(space.available), largest })
}

/// Deletes a volume that is not published, if `is_wanted` returns `true` at the end. Its space is freed in the background. Returns `false` if
/// the volume does not exist.
pub(super) fn delete(
    volumes: &Volumes,
    id: &VolumeId,
    filesystem: Option<FilesystemUuid>,
    is_wanted: impl FnOnce() -> bool,
) -> Result<bool> {
    let publisher = volumes.monitor.verified()?;
    require_filesystem(&publisher, filesystem)?;
    let existed = publisher.delete_while(id, is_wanted)?;
    volumes.trash_cleanup.request();
    volumes.changes.space();
    Ok(existed)
}

/// Expands a volume, and refreshes its loop devices. Returns its capacity, and `true` if its devices have this capacity.
pub(super) fn expand(
    volumes: &Volumes,
    id: &VolumeId,
    capacity: Bytes,
    filesystem: Option<FilesystemUuid>,
) -> Result<(Bytes, bool)> {
    let publisher = volumes.monitor.verified()?;
    require_filesystem(&publisher, filesystem)?;
    let volume = publisher.store().expand(id, capacity)?;
    let is_refreshed = is_refreshed(&publisher, &volume);
    // Last: those who watch the free space would take processor time from the refresh, for which the pod waits.
    volumes.changes.space();
    Ok((volume.capacity(), is_refreshed))
}

/// Refreshes the loop devices of a volume. A failure leaves that to NodeExpandVolume, which repairs what users have changed.
fn is_refreshed(publisher: &Publisher, volume: &Volume) -> bool {
    match publisher.refresh_size(volume) {
        Ok(size) => size >= volume.capacity(),
        Err(error) => {
            tracing::info!(volume = %volume.id(), %error, "could not refresh the size of the volume's loop devices; NodeExpandVolume retries");
            false
        }
    }
}

/// Returns the first expected property that the volume does not have.
fn first_difference(
    publisher: &Publisher,
    volume: &Volume,
    expected: &ExpectedProperties,
) -> Result<Option<String>> {
    let suits =
        require_kind(volume, expected.kind).and_then(|()| require_filesystem(publisher, expected.filesystem));
    if let Err(error) = suits {
        return Ok(Some(error.to_string()));
    }
    let Some(parameters) = &expected.parameters else { return Ok(None) };
    let difference = volume.settings_differ(&parameters.spec(volume.kind(), volume.capacity()))?;
    Ok(difference.map(|difference| format!("parameters: {difference}")))
}

/// Checks that the source exists and is of the requested kind, and flushes its devices. Returns the size of the
/// source.
fn source_size(publisher: &Publisher, requested: VolumeKind, source: &OwnedContentSource) -> Result<Bytes> {
    let absent = |error: loopfs::Error| match error.kind() {
        ErrorKind::NotFound => Error::SourceNotFound(format!("volume_content_source: {error}")),
        _ => error.into(),
    };
    let (kind, size) = match source.as_ref() {
        ContentSource::Snapshot(id) => {
            let snapshot = publisher.store().snapshot(id).map_err(absent)?;
            (snapshot.kind(), snapshot.capacity())
        }
        ContentSource::Volume(id) => {
            let volume = publisher.store().volume(id).map_err(absent)?;
            publisher.flush(&volume)?;
            (volume.kind(), volume.capacity())
        }
    };
    if kind == requested {
        return Ok(size);
    }
    Err(Error::UnsuitableSource(format!(
        "volume_content_source: {source} is a {kind} source, but a {requested} volume is requested"
    )))
}

fn create_volume(
    publisher: &Publisher,
    create: &Create,
    size: Bytes,
    is_wanted: &dyn Fn() -> bool,
) -> Result<Volume> {
    if !create.accessible_here {
        return Err(Error::NotOnThisNode(format!(
            "accessibility_requirements: volume {} must be on other nodes, but this driver creates volumes only on its own node",
            create.volume
        )));
    }
    let settings = create.parameters.spec(create.kind, size);
    let spec = VolumeSpec { annotations: create.annotations.clone(), ..settings };
    let created = match &create.source {
        Some(source) => publisher.store().clone_from_while(source.as_ref(), &create.volume, &spec, is_wanted),
        None => publisher.store().create(&create.volume, &spec),
    };
    created.map_err(|error| match error.kind() {
        ErrorKind::NoSpace => Error::NotOnThisNode(error.to_string()),
        // The settings of the source and of the new volume are incompatible.
        ErrorKind::Unsupported if create.source.is_some() => {
            Error::UnsuitableSource(format!("volume_content_source: {error}"))
        }
        _ => error.into(),
    })
}

/// Returns an error unless the volume, whether new or old, has the requested properties.
fn require_compatible(volume: &Volume, create: &Create) -> Result<()> {
    let CapacityRange { required, limit } = create.capacity;
    let has =
        |what: String| Err(Error::Incompatible(format!("volume {} exists already: {what}", volume.id())));
    if !create.accessible_here {
        return has("it is on this node, but requested on others".to_owned());
    }
    if volume.kind() != create.kind {
        return has(format!("it is a {} volume, but a {} volume is requested", volume.kind(), create.kind));
    }
    let source = volume.source()?;
    if source != create.source {
        let of = |source: &Option<OwnedContentSource>| match source {
            Some(source) => format!("created from {source}"),
            None => "created empty".to_owned(),
        };
        return has(format!("it was {}, but a volume {} is requested", of(&source), of(&create.source)));
    }
    let capacity = volume.capacity();
    if let Some(required) = required.filter(|required| capacity < *required) {
        return has(format!("it has {capacity}, but at least {required} are requested"));
    }
    if let Some(limit) = limit.filter(|limit| capacity > *limit) {
        return has(format!("it has {capacity}, but at most {limit} are requested"));
    }
    match volume.settings_differ(&create.parameters.spec(create.kind, capacity))? {
        Some(difference) => has(format!("its {difference}")),
        None => Ok(()),
    }
}

/// Returns the size of a new empty volume.
fn new_size(capacity: CapacityRange) -> Result<Bytes> {
    let CapacityRange { required, limit } = capacity;
    let default = || limit.map_or(DEFAULT_SIZE, |limit| whole_units(limit).max(UNIT).min(DEFAULT_SIZE));
    size_within(required.unwrap_or_else(default), limit)
}

/// Returns the size of a new volume with the content of a source of this size.
fn copied_size(capacity: CapacityRange, source: Bytes) -> Result<Bytes> {
    let CapacityRange { required, limit } = capacity;
    match limit {
        Some(limit) if limit < source => {
            Err(Error::OutOfRange(format!("the source has {source}, which is above the limit of {limit}")))
        }
        _ => size_within(required.unwrap_or(source).max(source), limit),
    }
}

/// Returns the smallest size of a volume within the limits.
fn size_within(required: Bytes, limit: Option<Bytes>) -> Result<Bytes> {
    let Some(size) = required.round_up() else {
        return Err(Error::OutOfRange(format!("{required} are more than the maximum size of a volume")));
    };
    match limit {
        Some(limit) if size > limit => Err(Error::OutOfRange(format!(
            "the size of a volume is a multiple of {UNIT}, and the smallest one that meets the request is {size}, which is above the \
             limit of {limit}"
        ))),
        _ => Ok(size),
    }
}

/// Rounds a size down to a multiple of [`UNIT`].
fn whole_units(Bytes(bytes): Bytes) -> Bytes {
    Bytes(bytes - bytes % UNIT.0)
}

#[cfg(test)]
mod tests;
