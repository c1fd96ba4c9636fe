//! The service for the provisioner of this node, on the control socket.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use csi_wire::volumes::create_request::Source;
use csi_wire::volumes::node_state::Storage;
use csi_wire::volumes::volumes_server::Volumes as VolumesRpc;
use csi_wire::{Settings, SettingsError, reserved, volumes as wire};
use loopfs::volume_store::{
    Annotations, ChargedTo, OwnedContentSource, SnapshotId, VolumeId, VolumeKind, VolumeSpec,
};
use loopfs::{Bytes, FilesystemUuid};
use tokio::sync::{mpsc, watch};
use tokio_stream::iter;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status, async_trait};

use super::controller;
use super::rpc::{self, RpcKind, VolumeOperations, Volumes, WhileCalled, found};
use crate::changes::{ChangeCounts, Changes};
use crate::custody;
use crate::error::{Error, InvalidRequest, Result};
use crate::foreign_files::{ForeignFileSearch, FoundFiles};
use crate::locks::{LockMode, OperationObject};
use crate::request;
use crate::storage::{Availability, StorageMonitor, require_filesystem};

/// How long changes are collected until they are sent. By then, a call that caused one is usually answered and its outcome recorded, and the
/// client that reads the free space delays neither.
const STATE_INTERVAL: Duration = Duration::from_millis(250);
/// The number of volumes in a page of a list.
const PAGE: usize = 1000;
/// The maximum length of the UID of a Node object, which the record of custody has. Kubernetes writes 36 characters.
const MAX_UID_LEN: usize = 64;

#[derive(Debug)]
pub(crate) struct VolumesService {
    operations: VolumeOperations,
    monitor: Arc<StorageMonitor>,
    changes: Arc<Changes>,
    foreign_files: Arc<ForeignFileSearch>,
    /// Locked while the record of custody is read and replaced.
    custody: Arc<Mutex<PathBuf>>,
    stop: CancellationToken,
}

impl VolumesService {
    pub(crate) fn new(
        operations: VolumeOperations,
        monitor: Arc<StorageMonitor>,
        changes: Arc<Changes>,
        foreign_files: Arc<ForeignFileSearch>,
        custody: PathBuf,
        stop: CancellationToken,
    ) -> Self {
        Self { operations, monitor, changes, foreign_files, custody: Arc::new(Mutex::new(custody)), stop }
    }
}

#[async_trait]
impl VolumesRpc for VolumesService {
    type WatchStream = ReceiverStream<Result<wire::NodeState, Status>>;
    type ListStream = BoxStream<wire::ListPage>;
    type ListForeignFilesStream = BoxStream<wire::ForeignFiles>;

    async fn watch(
        &self,
        _request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (sender, states) = mpsc::channel(1);
        let (monitor, mut changes, stop) =
            (Arc::clone(&self.monitor), self.changes.subscribe(), self.stop.clone());
        // Ends with the client or the driver, whose shutdown would wait for the stream.
        tokio::spawn(async move {
            let watching = async {
                loop {
                    let availability = monitor.availability();
                    let counts = *changes.borrow_and_update();
                    if sender.send(Ok(node_state(&availability, counts))).await.is_err() {
                        return;
                    }
                    tokio::select! {
                        () = next_changes(&mut changes) => {}
                        // At once: other calls depend on it.
                        () = monitor.wait_until_other_than(&availability) => {}
                        () = sender.closed() => return,
                    }
                }
            };
            stop.run_until_cancelled(watching).await;
        });
        Ok(Response::new(ReceiverStream::new(states)))
    }

    async fn create(
        &self,
        request: Request<wire::CreateRequest>,
    ) -> Result<Response<wire::CreateResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("Create", RpcKind::Mutating, &request.volume_id.clone(), async {
            let new = new_volume(request)?;
            let is_copy = new.source.is_some();
            let locks = [(new.volume.clone().into(), LockMode::Change)].into_iter();
            let locks = locks.chain(new.source.clone().map(|source| (source.into(), LockMode::Keep)));
            let work =
                move |volumes: &Volumes, is_wanted: &dyn Fn() -> bool| create(volumes, &new, is_wanted);
            match is_copy {
                // A copy is slow on a slow disk, and would begin again. The provisioner limits its copies.
                true => self.operations.copying(locks, work).await,
                false => {
                    let work = move |volumes: &Volumes| work(volumes, &|| true);
                    self.operations.locked_unless_hanging(locks, work).await
                }
            }
        })
        .await
    }

    async fn expand(
        &self,
        request: Request<wire::ExpandRequest>,
    ) -> Result<Response<wire::ExpandResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("Expand", RpcKind::Mutating, &request.volume_id, async {
            let id = request::volume_id(&request.volume_id)?;
            let filesystem = filesystem(&request.filesystem_uuid)?;
            // The kubelet's calls for the volume continue in the meantime.
            let locks = [
                (OperationObject::Capacity(id.clone()), LockMode::Change),
                (id.clone().into(), LockMode::Keep),
            ];
            let requested = Bytes(request.capacity);
            let work = move |volumes: &Volumes| controller::expand(volumes, &id, requested, filesystem);
            let (capacity, devices_refreshed) = self.operations.locked_unless_hanging(locks, work).await?;
            Ok(wire::ExpandResponse { capacity: capacity.0, devices_refreshed })
        })
        .await
    }

    async fn delete(
        &self,
        request: Request<wire::DeleteRequest>,
    ) -> Result<Response<wire::DeleteResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("Delete", RpcKind::Mutating, &request.volume_id, async {
            let id = request::volume_id(&request.volume_id)?;
            let filesystem = filesystem(&request.filesystem_uuid)?;
            let locks = [(id.clone().into(), LockMode::Remove)];
            let wanted = WhileCalled::default();
            let is_wanted = wanted.is_called();
            // Nothing is deleted for a client that has given up: the volume may have been retained since.
            let existed = self
                .operations
                .locked(locks, move |volumes| controller::delete(volumes, &id, filesystem, is_wanted))
                .await?;
            Ok(wire::DeleteResponse { existed })
        })
        .await
    }

    async fn confirm(
        &self,
        request: Request<wire::ConfirmRequest>,
    ) -> Result<Response<wire::ConfirmResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("Confirm", RpcKind::Mutating, &request.volume_id, async {
            let id = request::volume_id(&request.volume_id)?;
            let filesystem = filesystem(&request.filesystem_uuid)?;
            let work = move |volumes: &Volumes| {
                let publisher = volumes.monitor.verified()?;
                require_filesystem(&publisher, filesystem)?;
                // Confirming a volume that does not exist succeeds.
                found(publisher.store().confirm(&id)).map(drop)
            };
            self.operations.locked_unless_hanging([], work).await?;
            Ok(wire::ConfirmResponse {})
        })
        .await
    }

    async fn list(&self, request: Request<wire::ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        let only_pending = request.into_inner().only_pending;
        rpc::traced("List", RpcKind::Quiet, "", async {
            let work = move |volumes: &Volumes| {
                let publisher = volumes.monitor.verified()?;
                // Pending volumes last: one that was confirmed in between has its PersistentVolume.
                let ids = if only_pending { Vec::new() } else { publisher.store().list()? };
                let mut listed: HashMap<_, _> = ids.into_iter().map(|id| (id, None)).collect();
                for (id, annotations) in publisher.store().pending()? {
                    if only_pending || listed.contains_key(&id) {
                        listed.insert(id, Some(annotations));
                    }
                }
                Ok((publisher.store().filesystem_uuid(), listed))
            };
            let (filesystem, listed) = self.operations.locked_unless_hanging([], work).await?;
            let pages = pages(filesystem, listed).into_iter().map(Ok);
            Ok(Box::pin(iter(pages)) as Self::ListStream)
        })
        .await
    }

    async fn capacity(
        &self,
        request: Request<wire::CapacityRequest>,
    ) -> Result<Response<wire::CapacityResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("Capacity", RpcKind::Quiet, "", async {
            let settings = settings(&request.settings)?;
            let work = move |volumes: &Volumes| controller::capacity(volumes, &settings, None);
            let capacity = self.operations.locked_unless_hanging([], work).await?;
            Ok(wire::CapacityResponse { available: capacity.available.0, largest_volume: capacity.largest.0 })
        })
        .await
    }

    async fn take_custody(
        &self,
        request: Request<wire::TakeCustodyRequest>,
    ) -> Result<Response<wire::TakeCustodyResponse>, Status> {
        let node_uid = request.into_inner().node_uid;
        rpc::traced("TakeCustody", RpcKind::Quiet, "", async {
            require_uid(&node_uid)?;
            let record = Arc::clone(&self.custody);
            let work = move |volumes: &Volumes| {
                let publisher = volumes.monitor.verified()?;
                // The file is whole even if a holder panicked.
                let path = record.lock().unwrap_or_else(PoisonError::into_inner);
                custody::take(&path, &node_uid, publisher.store())
            };
            let custody = self.operations.locked_unless_hanging([], work).await?;
            Ok(wire::TakeCustodyResponse {
                filesystem_uuid: custody.filesystem_uuid,
                found: custody.found.into_iter().collect(),
            })
        })
        .await
    }

    async fn list_foreign_files(
        &self,
        _request: Request<wire::ListForeignFilesRequest>,
    ) -> Result<Response<Self::ListForeignFilesStream>, Status> {
        let found = self.foreign_files.found().into_iter().map(|found| Ok(foreign_files(found)));
        Ok(Response::new(Box::pin(iter(found))))
    }
}

/// Waits for a change, and collects those that follow it within [`STATE_INTERVAL`].
async fn next_changes(changes: &mut watch::Receiver<ChangeCounts>) {
    // The service holds the sender of the changes.
    drop(changes.changed().await);
    tokio::time::sleep(STATE_INTERVAL).await;
}

fn node_state(availability: &Availability, counts: ChangeCounts) -> wire::NodeState {
    let (storage, reason, filesystem_uuid) = match availability {
        Availability::Starting => (Storage::Starting, String::new(), String::new()),
        Availability::Absent(reason) => (Storage::Absent, reason.to_string(), String::new()),
        Availability::Unavailable(reason) => (Storage::Unavailable, reason.to_string(), String::new()),
        Availability::Available(uuid) => (Storage::Available, String::new(), uuid.to_string()),
    };
    let ChangeCounts { space, freed, foreign_files } = counts;
    wire::NodeState { storage: storage.into(), reason, filesystem_uuid, space, freed, foreign_files }
}

/// The volume of a claim that is to be created.
#[derive(Debug)]
struct NewVolume {
    volume: VolumeId,
    spec: VolumeSpec,
    source: Option<OwnedContentSource>,
}

fn new_volume(request: wire::CreateRequest) -> Result<NewVolume> {
    let kind = match request.kind() {
        wire::Kind::Filesystem => VolumeKind::Filesystem,
        wire::Kind::Block => VolumeKind::Block,
    };
    let source = match &request.source {
        None => None,
        Some(Source::Volume(id)) => {
            let id = VolumeId::parse(id).map_err(|error| invalid("source", &error))?;
            Some(OwnedContentSource::Volume(id))
        }
        Some(Source::Snapshot(id)) => {
            let id = SnapshotId::parse(id).map_err(|error| invalid("source", &error))?;
            Some(OwnedContentSource::Snapshot(id))
        }
    };
    let annotations =
        Annotations::new(request.annotations).map_err(|error| invalid("annotations", &error))?;
    let settings = settings(&request.settings)?.spec(kind, Bytes(request.capacity));
    let spec = VolumeSpec { annotations, pending: true, ..settings };
    Ok(NewVolume { volume: request::volume_id(&request.volume_id)?, spec, source })
}

/// Creates the pending volume of a claim, or returns the existing one whatever its settings are: the class may have been replaced
/// since then. If `is_wanted` returns `false`, a copy ends.
fn create(volumes: &Volumes, new: &NewVolume, is_wanted: &dyn Fn() -> bool) -> Result<wire::CreateResponse> {
    let publisher = volumes.monitor.verified()?;
    // The volume of an interrupted attempt is pending: nothing has written to it but the attempt.
    let held_data = match found(publisher.store().volume(&new.volume))? {
        Some(volume) => !volume.is_pending()? && volume.holds_data()?,
        None => false,
    };
    let volume = match &new.source {
        None => publisher.store().create(&new.volume, &new.spec)?,
        Some(source) => {
            if let OwnedContentSource::Volume(id) = source {
                publisher.flush(&publisher.store().volume(id)?)?;
            }
            publisher.store().clone_from_while(source.as_ref(), &new.volume, &new.spec, is_wanted)?
        }
    };
    volumes.changes.space();
    Ok(wire::CreateResponse {
        capacity: volume.capacity().0,
        filesystem_uuid: publisher.store().filesystem_uuid().to_string(),
        held_data,
    })
}

/// Returns the pages of a list: volumes, with the annotations of those that are pending.
fn pages(filesystem: FilesystemUuid, volumes: HashMap<VolumeId, Option<Annotations>>) -> Vec<wire::ListPage> {
    let volume = |(id, annotations): (VolumeId, Option<Annotations>)| wire::Volume {
        volume_id: id.to_string(),
        pending: annotations.is_some(),
        annotations: annotations.iter().flat_map(Annotations::iter).map(owned).collect(),
    };
    let mut volumes = volumes.into_iter().map(volume).peekable();
    let filesystem_uuid = filesystem.to_string();
    let mut pages = Vec::new();
    // There is one page at least, which names the file system.
    while pages.is_empty() || volumes.peek().is_some() {
        let volumes = volumes.by_ref().take(PAGE).collect();
        pages.push(wire::ListPage { filesystem_uuid: filesystem_uuid.clone(), volumes });
    }
    pages
}

fn foreign_files(FoundFiles { files, repaired }: FoundFiles) -> wire::ForeignFiles {
    let charged_volume_id = match &files.charged {
        ChargedTo::Volume(id) => id.to_string(),
        _ => String::new(),
    };
    wire::ForeignFiles {
        volume_id: files.volume.to_string(),
        charged: files.charged.to_string(),
        charged_volume_id,
        names: files.names,
        // The path can have any bytes.
        example: format!("{:?}", files.example),
        repaired,
    }
}

fn require_uid(node_uid: &str) -> Result<()> {
    match node_uid.len() {
        1..=MAX_UID_LEN if node_uid.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(()),
        _ => {
            let problem = format!("must be 1 to {MAX_UID_LEN} printable ASCII characters without spaces");
            Err(InvalidRequest::new("node_uid", problem).into())
        }
    }
}

fn filesystem(text: &str) -> Result<Option<FilesystemUuid>> {
    match text {
        "" => Ok(None),
        text => Ok(Some(text.parse().map_err(|error: loopfs::Error| invalid("filesystem_uuid", &error))?)),
    }
}

fn settings(settings: &HashMap<String, String>) -> Result<Settings> {
    Settings::parse(settings, reserved::of_class, &[])
        .map_err(|error: SettingsError| InvalidRequest::new("settings", error.to_string()).into())
}

fn invalid(field: &'static str, error: &loopfs::Error) -> Error {
    InvalidRequest::new(field, error.to_string()).into()
}

fn owned((key, value): (&str, &str)) -> (String, String) {
    (key.to_owned(), value.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::collection::hash_map;
    use proptest::option;
    use proptest::prelude::*;
    use tokio::time::Instant;

    use super::*;

    fn request() -> impl Strategy<Value = wire::CreateRequest> {
        let id = || prop_oneof![any::<String>(), "[a-z.-]{1,8}"];
        let pairs = || hash_map(id(), any::<String>(), 0..3);
        let source = option::of((any::<bool>(), id()));
        (id(), any::<i32>(), any::<u64>(), pairs(), pairs(), source).prop_map(
            |(volume_id, kind, capacity, settings, annotations, source)| {
                let source = source.map(|(is_volume, id)| match is_volume {
                    true => Source::Volume(id),
                    false => Source::Snapshot(id),
                });
                wire::CreateRequest { volume_id, kind, capacity, settings, annotations, source }
            },
        )
    }

    #[tokio::test(start_paused = true)]
    async fn changes_are_sent_together() {
        let (changes, begun) = (Changes::default(), Instant::now());
        let mut watched = changes.subscribe();
        changes.space();
        let later = async {
            tokio::time::sleep(STATE_INTERVAL / 2).await;
            changes.freed();
        };
        tokio::join!(next_changes(&mut watched), later);
        assert_eq!(begun.elapsed(), STATE_INTERVAL);
        let both = ChangeCounts { space: 2, freed: 1, foreign_files: 0 };
        assert_eq!(*watched.borrow_and_update(), both);
        assert!(!watched.has_changed().unwrap());
    }

    proptest! {
        /// Any other request is refused as invalid.
        #[test]
        fn valid_requests_create_pending_volumes(request in request()) {
            match new_volume(request.clone()) {
                Ok(new) => {
                    prop_assert_eq!(new.volume.as_str(), &request.volume_id);
                    prop_assert!(new.spec.pending && !new.volume.as_str().contains('/'));
                    prop_assert_eq!(new.source.is_some(), request.source.is_some());
                }
                Err(error) => prop_assert!(matches!(error, Error::Invalid(_)), "{}", error),
            }
        }
    }
}
