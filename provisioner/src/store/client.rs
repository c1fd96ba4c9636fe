//! The client of the driver `loopfs-csi`, over its control socket.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::error::Error as _;
use std::iter;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use csi_wire::reason::Reason;
use csi_wire::volumes::volumes_client::VolumesClient;
use csi_wire::volumes::{self as wire, node_state};
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use http::Uri;
use loopfs::Bytes;
use loopfs::volume_store::{Annotations, OwnedContentSource, VolumeId, VolumeKind};
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status, Streaming};

use crate::store::claim_record::ClaimRecord;
use crate::store::driver::{
    Custody, Driver, NewVolume, NodeState, StorageError, StorageState, VolumeError, VolumeList,
};

/// Longest time for a call that changes a volume. An image is allocated in this time.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time for a call that only reads.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of pings, also while no call is in progress: the call that watches the storage is never answered if the driver hangs.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Longest time for the response to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// The driver behind its control socket. It connects when a call needs a connection, and again after the connection broke.
#[derive(Debug, Clone)]
pub(crate) struct DriverClient {
    socket: PathBuf,
    calls: VolumesClient<Channel>,
}

impl DriverClient {
    /// Returns a client, whether or not a driver listens. Needs a runtime.
    pub(crate) fn new(socket: &Path) -> anyhow::Result<Self> {
        let path = socket.to_str().with_context(|| format!("{}: not a text", socket.display()))?;
        let channel = Endpoint::from_shared(format!("unix://{path}"))?
            // A socket has no name. The driver expects this one, as from all clients.
            .origin(Uri::from_static("http://localhost"))
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .connect_lazy();
        Ok(DriverClient { socket: socket.to_owned(), calls: VolumesClient::new(channel) })
    }

    fn calls(&self) -> VolumesClient<Channel> {
        self.calls.clone()
    }

    /// Awaits the response to a call. `filesystem_uuid` is the file system on which the call expects the volume.
    async fn answer<T>(
        &self,
        limit: Duration,
        filesystem_uuid: Option<&str>,
        call: impl Future<Output = Result<T, Status>> + Send,
    ) -> Result<T, StorageError> {
        match timeout(limit, call).await {
            Ok(answer) => answer.map_err(|status| self.error(&status, filesystem_uuid)),
            Err(_elapsed) => Err(self.unanswered(&format!("no response within {limit:?}"))),
        }
    }

    async fn read<T>(&self, call: impl Future<Output = Result<T, Status>> + Send) -> Result<T, StorageError> {
        self.answer(READ_TIMEOUT, None, call).await
    }

    async fn change<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>> + Send,
    ) -> Result<T, StorageError> {
        self.answer(CHANGE_TIMEOUT, None, call).await.map(Response::into_inner)
    }

    fn error(&self, status: &Status, filesystem_uuid: Option<&str>) -> StorageError {
        let message = status.message().to_owned();
        match Reason::of(status) {
            Some(Reason::Store(kind)) => VolumeError { kind, message }.into(),
            Some(Reason::Pending) => StorageError::Pending(message),
            Some(Reason::Unavailable) => StorageError::Unavailable(message),
            Some(Reason::OtherFilesystem(present)) => StorageError::OtherFilesystem {
                of_volume: filesystem_uuid.unwrap_or_default().to_owned(),
                of_node: present.to_string(),
            },
            Some(Reason::Defect) => StorageError::Defect(message),
            None => {
                // The text of the transport says only that it failed.
                let cause = iter::successors(status.source(), |&error| error.source()).last();
                self.unanswered(&cause.map_or(message, ToString::to_string))
            }
        }
    }

    fn unanswered(&self, cause: &str) -> StorageError {
        StorageError::Unanswered(format!(
            "the driver loopfs-csi does not answer on its socket {}: {cause}; check that the container csi or the service loopfs-csi runs on \
             this node, and read its log",
            self.socket.display()
        ))
    }
}

#[tonic::async_trait]
impl Driver for DriverClient {
    async fn watch(&self) -> Result<BoxStream<'static, Result<NodeState, StorageError>>, StorageError> {
        let states = self.calls().watch(wire::WatchRequest {}).await;
        let states: Streaming<_> = states.map_err(|status| self.error(&status, None))?.into_inner();
        let ended = Err(self.unanswered("the driver ended the connection"));
        let client = self.clone();
        let states =
            states.map(move |state| state.map(node_state).map_err(|status| client.error(&status, None)));
        Ok(states.chain(stream::once(std::future::ready(ended))).boxed())
    }

    async fn create(&self, volume: NewVolume) -> Result<wire::CreateResponse, StorageError> {
        let request = create_request(volume);
        let is_copy = request.source.is_some();
        let mut calls = self.calls();
        let created = calls.create(request);
        if is_copy {
            return created.await.map(Response::into_inner).map_err(|status| self.error(&status, None));
        }
        self.change(created).await
    }

    async fn expand(
        &self,
        id: &VolumeId,
        to: Bytes,
        filesystem_uuid: Option<&str>,
    ) -> Result<wire::ExpandResponse, StorageError> {
        let request = wire::ExpandRequest {
            volume_id: id.to_string(),
            capacity: to.0,
            filesystem_uuid: filesystem_uuid.unwrap_or_default().to_owned(),
        };
        let mut calls = self.calls();
        let expanded = self.answer(CHANGE_TIMEOUT, filesystem_uuid, calls.expand(request)).await;
        expanded.map(Response::into_inner)
    }

    async fn delete(&self, id: &VolumeId, filesystem_uuid: Option<&str>) -> Result<bool, StorageError> {
        let request = wire::DeleteRequest {
            volume_id: id.to_string(),
            filesystem_uuid: filesystem_uuid.unwrap_or_default().to_owned(),
        };
        let mut calls = self.calls();
        let deleted = self.answer(CHANGE_TIMEOUT, filesystem_uuid, calls.delete(request)).await?;
        Ok(deleted.into_inner().existed)
    }

    async fn confirm(&self, id: &VolumeId, filesystem_uuid: &str) -> Result<(), StorageError> {
        let filesystem = filesystem_uuid.to_owned();
        let request = wire::ConfirmRequest { volume_id: id.to_string(), filesystem_uuid: filesystem };
        let mut calls = self.calls();
        self.answer(READ_TIMEOUT, Some(filesystem_uuid), calls.confirm(request)).await.map(drop)
    }

    async fn list(&self, only_pending: bool) -> Result<VolumeList, StorageError> {
        let mut calls = self.calls();
        let pages = async {
            let pages = calls.list(wire::ListRequest { only_pending }).await?;
            pages.into_inner().try_collect::<Vec<_>>().await
        };
        let mut list = VolumeList::default();
        for page in self.read(pages).await? {
            list.filesystem_uuid = page.filesystem_uuid;
            for volume in page.volumes {
                let id = volume_id(&volume.volume_id)?;
                list.pending.extend(pending(&id, volume).map(|record| (id.clone(), record)));
                list.volumes.insert(id);
            }
        }
        Ok(list)
    }

    async fn capacity(
        &self,
        settings: &BTreeMap<String, String>,
    ) -> Result<wire::CapacityResponse, StorageError> {
        let request = wire::CapacityRequest { settings: map(settings) };
        self.read(self.calls().capacity(request)).await.map(Response::into_inner)
    }

    async fn take_custody(&self, node_uid: &str) -> Result<Custody, StorageError> {
        let request = wire::TakeCustodyRequest { node_uid: node_uid.to_owned() };
        let record = self.change(self.calls().take_custody(request)).await?;
        let found: BTreeSet<_> = record.found.into_iter().collect();
        Ok(Custody { filesystem_uuid: record.filesystem_uuid, found })
    }

    async fn foreign_files(&self) -> Result<Vec<wire::ForeignFiles>, StorageError> {
        let mut calls = self.calls();
        let found = async {
            let found = calls.list_foreign_files(wire::ListForeignFilesRequest {}).await?;
            found.into_inner().try_collect::<Vec<_>>().await
        };
        self.read(found).await
    }
}

fn create_request(volume: NewVolume) -> wire::CreateRequest {
    wire::CreateRequest {
        volume_id: volume.id.to_string(),
        kind: match volume.kind {
            VolumeKind::Filesystem => wire::Kind::Filesystem,
            VolumeKind::Block => wire::Kind::Block,
        }
        .into(),
        capacity: volume.capacity.0,
        settings: map(&volume.settings),
        annotations: volume
            .annotations
            .iter()
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect(),
        source: volume.source.map(|source| match source {
            OwnedContentSource::Volume(id) => wire::create_request::Source::Volume(id.to_string()),
            OwnedContentSource::Snapshot(id) => wire::create_request::Source::Snapshot(id.to_string()),
        }),
    }
}

fn map(pairs: &BTreeMap<String, String>) -> HashMap<String, String> {
    pairs.iter().map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn node_state(state: wire::NodeState) -> NodeState {
    let wire::NodeState { reason, filesystem_uuid, space, freed, foreign_files, .. } = state;
    let storage = match node_state::Storage::try_from(state.storage) {
        Ok(node_state::Storage::Starting) => StorageState::Untried,
        Ok(node_state::Storage::Absent) => StorageState::Absent(reason),
        Ok(node_state::Storage::Available) => StorageState::Open { filesystem_uuid },
        Ok(node_state::Storage::Unavailable) | Err(_) => StorageState::Unavailable(reason),
    };
    NodeState { storage, space, freed, foreign_files }
}

fn volume_id(text: &str) -> Result<VolumeId, StorageError> {
    VolumeId::parse(text).map_err(|error| StorageError::Defect(error.to_string()))
}

/// Returns the claim of a pending volume, unless another program created the volume.
fn pending(id: &VolumeId, volume: wire::Volume) -> Option<ClaimRecord> {
    if !volume.pending {
        return None;
    }
    let annotations = Annotations::new(volume.annotations).ok();
    let record = annotations.and_then(|annotations| ClaimRecord::of_volume(id, &annotations));
    if record.is_none() {
        tracing::debug!(volume = %id, "a pending volume of another program stays");
    }
    record
}

#[cfg(test)]
mod tests;
