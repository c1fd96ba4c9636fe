//! The service for the provisioner of this node, on the control socket.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use csi_wire::reserved;
use csi_wire::volumes as wire;
use csi_wire::volumes::create_request::Source;
use csi_wire::volumes::node_state::Storage;
use csi_wire::volumes::volumes_server::Volumes as VolumesRpc;
use csi_wire::{Settings, SettingsError};
use loopfs::volume_store::{
    Annotations, ChargedTo, OwnedContentSource, SnapshotId, VolumeId, VolumeKind, VolumeSpec,
};
use loopfs::{Bytes, FilesystemUuid};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, iter};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, async_trait};

use super::rpc::{self, RpcKind};
use crate::changes::{ChangeCounts, Changes};
use crate::custody::{self, CustodyPath};
use crate::error::{Error, InvalidRequest, Result};
use crate::foreign_files::{ForeignFileSearch, FoundFiles};
use crate::locks::{LockMode, OperationObject};
use crate::storage::{Availability, StorageMonitor};
use crate::volumes::{NewVolume, VolumeOperations, Volumes};

/// The shortest time between two states of the node.
const STATE_INTERVAL: Duration = Duration::from_millis(100);
/// The number of volumes in a page of a list.
const PAGE: usize = 1000;

#[derive(Debug)]
pub(crate) struct VolumesService {
    operations: VolumeOperations,
    monitor: Arc<StorageMonitor>,
    changes: Arc<Changes>,
    foreign_files: Arc<ForeignFileSearch>,
    /// Locked while the record of custody is read and replaced.
    custody: Arc<Mutex<CustodyPath>>,
    stop: CancellationToken,
}

impl VolumesService {
    pub(crate) fn new(
        operations: VolumeOperations,
        monitor: Arc<StorageMonitor>,
        changes: Arc<Changes>,
        foreign_files: Arc<ForeignFileSearch>,
        custody: CustodyPath,
        stop: CancellationToken,
    ) -> Self {
        Self { operations, monitor, changes, foreign_files, custody: Arc::new(Mutex::new(custody)), stop }
    }

    /// Runs work under these locks. Returns an error as soon as the disk hangs; the work goes on.
    async fn run<T: Send + 'static>(
        &self,
        locks: impl IntoIterator<Item = (OperationObject, LockMode)>,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        tokio::select! {
            outcome = self.operations.locked(locks, work) => outcome,
            error = self.monitor.wait_until_hanging() => Err(error),
        }
    }

    async fn create_volume(&self, request: wire::CreateRequest) -> Result<wire::CreateResponse> {
        let new = new_volume(request)?;
        let is_copy = new.source.is_some();
        let locks = [(new.volume.clone().into(), LockMode::Change)].into_iter();
        let locks = locks.chain(new.source.clone().map(|source| (source.into(), LockMode::Keep)));
        let wanted = WhileCalled::default();
        let (is_wanted, stop) = (wanted.is_called(), self.stop.clone());
        let work = move |volumes: &Volumes| {
            // The next driver would throw the copy away.
            volumes.provision(&new, || is_wanted() && !stop.is_cancelled())
        };
        // A copy is slow on a slow disk, and would begin again.
        let created = match is_copy {
            true => self.operations.locked(locks, work).await?,
            false => self.run(locks, work).await?,
        };
        Ok(wire::CreateResponse {
            capacity: created.capacity.0,
            filesystem_uuid: created.filesystem.to_string(),
            held_data: created.held_data,
        })
    }

    async fn expand_volume(&self, request: wire::ExpandRequest) -> Result<wire::ExpandResponse> {
        let id = volume_id(&request.volume_id)?;
        let filesystem = filesystem(&request.filesystem_uuid)?;
        // The kubelet's calls for the volume continue in the meantime.
        let locks =
            [(OperationObject::Capacity(id.clone()), LockMode::Change), (id.clone().into(), LockMode::Keep)];
        let expanded =
            self.run(locks, move |volumes| volumes.expand(&id, Bytes(request.capacity), filesystem)).await?;
        Ok(wire::ExpandResponse {
            capacity: expanded.volume.capacity().0,
            devices_refreshed: expanded.devices_refreshed,
        })
    }

    async fn list_volumes(&self, only_pending: bool) -> Result<Vec<wire::ListPage>> {
        let (filesystem, volumes) = self
            .run([], move |volumes| {
                let publisher = volumes.verified()?;
                // Pending volumes last: one that was confirmed in between has its PersistentVolume.
                let ids = if only_pending { Vec::new() } else { publisher.store().list()? };
                let mut listed: HashMap<_, _> = ids.into_iter().map(|id| (id, None)).collect();
                for (id, annotations) in publisher.store().pending()? {
                    if only_pending || listed.contains_key(&id) {
                        listed.insert(id, Some(annotations));
                    }
                }
                Ok((publisher.store().filesystem_uuid(), listed))
            })
            .await?;
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
        Ok(pages)
    }
}

/// A stream of messages.
type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[async_trait]
impl VolumesRpc for VolumesService {
    type WatchStream = ReceiverStream<Result<wire::NodeState, Status>>;
    type ListStream = Messages<wire::ListPage>;
    type ListForeignFilesStream = Messages<wire::ForeignFiles>;

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
                    tokio::time::sleep(STATE_INTERVAL).await;
                    tokio::select! {
                        // The service holds the sender of the changes.
                        changed = changes.changed() => drop(changed),
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
        rpc::traced("Create", RpcKind::Mutating, &request.volume_id.clone(), self.create_volume(request))
            .await
    }

    async fn expand(
        &self,
        request: Request<wire::ExpandRequest>,
    ) -> Result<Response<wire::ExpandResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("Expand", RpcKind::Mutating, &request.volume_id.clone(), self.expand_volume(request))
            .await
    }

    async fn delete(
        &self,
        request: Request<wire::DeleteRequest>,
    ) -> Result<Response<wire::DeleteResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("Delete", RpcKind::Mutating, &request.volume_id, async {
            let id = volume_id(&request.volume_id)?;
            let filesystem = filesystem(&request.filesystem_uuid)?;
            let locks = [(id.clone().into(), LockMode::Remove)];
            let wanted = WhileCalled::default();
            let is_wanted = wanted.is_called();
            // Nothing is deleted for a client that has given up: the volume may have been retained since.
            let existed = self
                .operations
                .locked(locks, move |volumes| match is_wanted() {
                    true => volumes.delete(&id, filesystem),
                    false => Err(Error::Temporary("the client has ended the call".to_owned())),
                })
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
            let id = volume_id(&request.volume_id)?;
            let filesystem = filesystem(&request.filesystem_uuid)?;
            self.run([], move |volumes| volumes.confirm(&id, filesystem)).await?;
            Ok(wire::ConfirmResponse {})
        })
        .await
    }

    async fn list(&self, request: Request<wire::ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        let only_pending = request.into_inner().only_pending;
        rpc::traced("List", RpcKind::ReadOnly, "", async {
            let pages = self.list_volumes(only_pending).await?;
            Ok(Box::pin(iter(pages.into_iter().map(Ok))) as Self::ListStream)
        })
        .await
    }

    async fn capacity(
        &self,
        request: Request<wire::CapacityRequest>,
    ) -> Result<Response<wire::CapacityResponse>, Status> {
        let request = request.into_inner();
        rpc::traced("Capacity", RpcKind::ReadOnly, "", async {
            let settings = settings(&request.settings)?;
            let capacity = self.run([], move |volumes| volumes.capacity(&settings, None)).await?;
            Ok(wire::CapacityResponse { available: capacity.available.0, largest_volume: capacity.largest.0 })
        })
        .await
    }

    async fn take_custody(
        &self,
        request: Request<wire::TakeCustodyRequest>,
    ) -> Result<Response<wire::TakeCustodyResponse>, Status> {
        let node_uid = request.into_inner().node_uid;
        rpc::traced("TakeCustody", RpcKind::ReadOnly, "", async {
            let record = Arc::clone(&self.custody);
            let custody = self
                .run([], move |volumes| {
                    let publisher = volumes.verified()?;
                    // The file is whole even if a holder panicked.
                    let path = record.lock().unwrap_or_else(PoisonError::into_inner);
                    custody::take(&path, &node_uid, publisher.store())
                })
                .await?;
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

/// Dropped with the call. The work of the call asks whether the client still waits for it.
#[derive(Default)]
struct WhileCalled(Arc<()>);

impl WhileCalled {
    fn is_called(&self) -> impl Fn() -> bool + use<> {
        let called = Arc::downgrade(&self.0);
        move || called.strong_count() > 0
    }
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

fn new_volume(request: wire::CreateRequest) -> Result<NewVolume> {
    let kind = match request.kind() {
        wire::Kind::Filesystem => VolumeKind::Filesystem,
        wire::Kind::Block => VolumeKind::Block,
    };
    let source = match &request.source {
        None => None,
        Some(Source::Volume(id)) => Some(OwnedContentSource::Volume(volume_id(id)?)),
        Some(Source::Snapshot(id)) => {
            let id = SnapshotId::parse(id).map_err(|error| invalid("source", &error))?;
            Some(OwnedContentSource::Snapshot(id))
        }
    };
    let annotations =
        Annotations::new(request.annotations).map_err(|error| invalid("annotations", &error))?;
    let settings = settings(&request.settings)?.spec(kind, Bytes(request.capacity));
    let spec = VolumeSpec { annotations, pending: true, ..settings };
    Ok(NewVolume { volume: volume_id(&request.volume_id)?, spec, source })
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

fn volume_id(text: &str) -> Result<VolumeId> {
    VolumeId::parse(text).map_err(|error| invalid("volume_id", &error))
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

    proptest! {
        #[test]
        fn any_request_is_refused_or_creates_a_pending_volume(request in request()) {
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

    #[test]
    fn work_knows_whether_its_call_was_dropped() {
        let call = WhileCalled::default();
        let is_called = call.is_called();
        assert!(is_called());
        drop(call);
        assert!(!is_called());
    }
}
