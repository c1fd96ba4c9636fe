//! A fake driver whose volumes are in memory, with the failures that this crate's tests need.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use csi_wire::volumes::{CapacityResponse, CreateResponse, ExpandResponse, ForeignFiles};
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use loopfs::volume_store::{OwnedContentSource, SnapshotId, VolumeId, VolumeKind};
use loopfs::{Bytes, ErrorKind};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::store::claim_record::ClaimRecord;
use crate::store::driver::{
    Custody, Driver, NewVolume, NodeState, StorageError, StorageState, VolumeError, VolumeList,
};
use crate::testing::fixtures;

/// A driver with a store of a given size.
pub(crate) struct FakeStore {
    state: Mutex<FakeStoreState>,
    /// The reported state, or `None` while the driver does not run.
    reported: watch::Sender<Option<NodeState>>,
    once_created: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    copies_wanted: AtomicUsize,
    copies_begun: watch::Sender<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct FakeStoreState {
    pub(crate) size: Bytes,
    pub(crate) volumes: BTreeMap<VolumeId, (VolumeKind, Bytes)>,
    /// The volumes that hold data.
    pub(crate) with_data: BTreeSet<VolumeId>,
    pub(crate) pending: BTreeMap<VolumeId, ClaimRecord>,
    /// The data source of each copy.
    pub(crate) copies: BTreeMap<VolumeId, String>,
    pub(crate) snapshots: BTreeMap<SnapshotId, VolumeKind>,
    pub(crate) custody: Option<CustodyRecord>,
    /// Deleting a volume fails, because it is in use.
    pub(crate) busy: bool,
    /// Another call works on each volume.
    pub(crate) locked: bool,
    /// The capacity of loop devices is refreshed.
    pub(crate) refreshed: bool,
    foreign: Vec<ForeignFiles>,
    /// The error of all operations.
    broken: Option<VolumeError>,
    space: u64,
    freed: u64,
    foreign_files: u64,
}

/// The record of custody, as the driver keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CustodyRecord {
    pub(crate) node_uid: String,
    pub(crate) custody: Custody,
}

impl CustodyRecord {
    /// Returns the record of a node that got its disk when there was no volume.
    pub(crate) fn of_empty_disk(node_uid: &str) -> Self {
        Self::next(None, node_uid, fixtures::FILESYSTEM, &BTreeSet::new())
    }

    /// Returns the record that follows one.
    pub(crate) fn next(
        before: Option<Self>,
        node_uid: &str,
        filesystem_uuid: &str,
        volumes: &BTreeSet<VolumeId>,
    ) -> Self {
        let names: BTreeSet<_> = volumes.iter().map(ToString::to_string).collect();
        let is_same = |of: &Self| of.node_uid == node_uid && of.custody.filesystem_uuid == filesystem_uuid;
        let found = match before.filter(is_same) {
            Some(before) => &before.custody.found & &names,
            None => names,
        };
        let custody = Custody { filesystem_uuid: filesystem_uuid.to_owned(), found };
        CustodyRecord { node_uid: node_uid.to_owned(), custody }
    }
}

impl FakeStore {
    pub(crate) fn of_size(size: Bytes) -> Self {
        let state = FakeStoreState { size, ..FakeStoreState::default() };
        FakeStore {
            reported: watch::Sender::new(Some(state.reported())),
            state: Mutex::new(state),
            once_created: Mutex::default(),
            copies_wanted: AtomicUsize::default(),
            copies_begun: watch::Sender::default(),
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, FakeStoreState> {
        self.state.lock()
    }

    /// Adds a Filesystem volume of 1 MiB, as an earlier process left it.
    pub(crate) fn add(&self, id: &str) -> VolumeId {
        let id = VolumeId::parse(id).unwrap();
        self.state().volumes.insert(id.clone(), (VolumeKind::Filesystem, Bytes(1 << 20)));
        id
    }

    pub(crate) fn node_state(&self) -> NodeState {
        self.state().reported()
    }

    /// Lets all operations fail, or succeed again.
    pub(crate) fn break_with(&self, error: impl Into<Option<VolumeError>>) {
        self.state().broken = error.into();
        self.report();
    }

    /// Changes the numbers of the reported state.
    pub(crate) fn count(&self, change: impl FnOnce(&mut FakeStoreState)) {
        change(&mut self.state());
        self.report();
    }

    /// Lets a search find these files.
    pub(crate) fn find(&self, files: Vec<ForeignFiles>) {
        self.count(|state| {
            state.foreign = files;
            state.foreign_files += 1;
        });
    }

    /// Ends the driver: connections break, and no connection succeeds.
    pub(crate) fn stop(&self) {
        self.reported.send_replace(None);
    }

    /// Starts the driver, which reports this state first.
    pub(crate) fn start(&self, storage: StorageState) {
        self.reported.send_replace(Some(NodeState { storage, ..self.node_state() }));
    }

    pub(crate) fn report(&self) {
        let state = self.node_state();
        self.reported.send_modify(|reported| {
            if let Some(reported) = reported {
                *reported = state;
            }
        });
    }

    /// Calls a function when the next volume was created, before `create` returns.
    #[cfg(feature = "apiserver-tests")]
    pub(crate) fn once_created(&self, happen: impl FnOnce() + Send + 'static) {
        *self.once_created.lock() = Some(Box::new(happen));
    }

    /// Makes each copy wait until `wanted` copies are in progress.
    pub(crate) fn wait_for_copies(&self, wanted: usize) {
        self.copies_wanted.store(wanted, Ordering::Relaxed);
    }

    pub(crate) fn copies_begun(&self) -> usize {
        *self.copies_begun.borrow()
    }

    pub(crate) fn capacity(&self, id: &str) -> Option<Bytes> {
        self.state().volumes.get(&VolumeId::parse(id).unwrap()).map(|(_, capacity)| *capacity)
    }

    /// Returns the state for an operation on a volume.
    fn usable(&self) -> Result<MutexGuard<'_, FakeStoreState>, StorageError> {
        let state = self.state();
        match &state.broken {
            Some(error) => Err(error.clone().into()),
            None if state.locked => Err(StorageError::Pending("another call works on the volume".to_owned())),
            None => Ok(state),
        }
    }

    async fn copy(&self, source: &OwnedContentSource, kind: VolumeKind) -> Result<(), StorageError> {
        let of_source = match source {
            OwnedContentSource::Volume(source) => self.usable()?.volumes.get(source).map(|(kind, _)| *kind),
            OwnedContentSource::Snapshot(source) => self.usable()?.snapshots.get(source).copied(),
        };
        let source = source.as_ref();
        match of_source {
            None => return Err(error(ErrorKind::NotFound, format!("{source} does not exist")).into()),
            Some(other) if other != kind => {
                return Err(error(ErrorKind::InvalidInput, format!("{source} is a {other} volume")).into());
            }
            Some(_) => {}
        }
        let wanted = self.copies_wanted.load(Ordering::Relaxed);
        self.copies_begun.send_modify(|begun| *begun += 1);
        // An error would mean that the sender was dropped, but `self` holds it.
        drop(self.copies_begun.subscribe().wait_for(|begun| *begun >= wanted).await);
        if self.state().busy {
            let message = format!("{source}: directories were moved while they were copied");
            return Err(error(ErrorKind::Busy, message).into());
        }
        Ok(())
    }
}

impl FakeStoreState {
    fn require(&self, id: &VolumeId, more: Bytes) -> Result<(), VolumeError> {
        let available = self.available().0;
        if more.0 <= available {
            return Ok(());
        }
        Err(error(
            ErrorKind::NoSpace,
            format!("volume {id}: {} bytes requested, {available} available", more.0),
        ))
    }

    pub(crate) fn available(&self) -> Bytes {
        Bytes(self.size.0 - self.volumes.values().map(|(_, capacity)| capacity.0).sum::<u64>())
    }

    pub(crate) fn count_space(&mut self) {
        self.space += 1;
    }

    pub(crate) fn count_freed(&mut self) {
        self.freed += 1;
    }

    fn reported(&self) -> NodeState {
        let storage = match self.broken.clone() {
            Some(error) if error.kind == ErrorKind::NeverMounted => StorageState::Absent(error.message),
            Some(error) => StorageState::Unavailable(error.message),
            None => StorageState::Open { filesystem_uuid: fixtures::FILESYSTEM.to_owned() },
        };
        let FakeStoreState { space, freed, foreign_files, .. } = *self;
        NodeState { storage, space, freed, foreign_files }
    }
}

pub(crate) fn error(kind: ErrorKind, message: impl Into<String>) -> VolumeError {
    VolumeError { kind, message: message.into() }
}

fn not_running() -> StorageError {
    StorageError::Unanswered("the driver does not run".to_owned())
}

fn require_filesystem(expected: Option<&str>) -> Result<(), StorageError> {
    match expected {
        Some(of_volume) if of_volume != fixtures::FILESYSTEM => Err(StorageError::OtherFilesystem {
            of_volume: of_volume.to_owned(),
            of_node: fixtures::FILESYSTEM.to_owned(),
        }),
        _ => Ok(()),
    }
}

#[tonic::async_trait]
impl Driver for FakeStore {
    async fn watch(&self) -> Result<BoxStream<'static, Result<NodeState, StorageError>>, StorageError> {
        let mut reported = self.reported.subscribe();
        if reported.borrow().is_none() {
            return Err(not_running());
        }
        reported.mark_changed();
        let states = stream::unfold(Some(reported), async |reported| {
            let mut reported = reported?;
            reported.changed().await.ok()?;
            let state = reported.borrow_and_update().clone();
            Some(match state {
                Some(state) => (Ok(state), Some(reported)),
                None => (Err(not_running()), None),
            })
        });
        Ok(states.boxed())
    }

    async fn create(&self, volume: NewVolume) -> Result<CreateResponse, StorageError> {
        let NewVolume { id, kind, annotations, source, .. } = volume;
        if let Some(source) = &source {
            self.copy(source, kind).await?;
        }
        let capacity = volume.capacity.round_up().unwrap();
        let filesystem_uuid = fixtures::FILESYSTEM.to_owned();
        let mut state = self.usable()?;
        match state.volumes.get(&id) {
            Some((of_kind, existing)) if *of_kind == kind && *existing >= capacity => {
                let held_data = !state.pending.contains_key(&id) && state.with_data.contains(&id);
                return Ok(CreateResponse { capacity: existing.0, filesystem_uuid, held_data });
            }
            Some(_) => {
                let message = format!("volume {id} exists with another kind or size");
                return Err(error(ErrorKind::AlreadyExists, message).into());
            }
            None => state.require(&id, capacity)?,
        }
        state.volumes.insert(id.clone(), (kind, capacity));
        let record = ClaimRecord::parse(&annotations).expect("the annotations of a claim");
        state.pending.insert(id.clone(), record);
        state.copies.extend(source.map(|source| (id, source.as_ref().to_string())));
        state.count_space();
        drop(state);
        self.report();
        if let Some(happen) = self.once_created.lock().take() {
            happen();
        }
        Ok(CreateResponse { capacity: capacity.0, filesystem_uuid, held_data: false })
    }

    async fn expand(
        &self,
        id: &VolumeId,
        to: Bytes,
        filesystem_uuid: Option<&str>,
    ) -> Result<ExpandResponse, StorageError> {
        require_filesystem(filesystem_uuid)?;
        let to = to.round_up().unwrap();
        let mut state = self.usable()?;
        let Some((kind, existing)) = state.volumes.get(id).copied() else {
            return Err(error(ErrorKind::NotFound, format!("volume {id} does not exist")).into());
        };
        if to > existing {
            state.require(id, to.saturating_sub(existing))?;
            state.volumes.insert(id.clone(), (kind, to));
            state.count_space();
        }
        let devices_refreshed = state.refreshed;
        drop(state);
        self.report();
        Ok(ExpandResponse { capacity: to.max(existing).0, devices_refreshed })
    }

    async fn delete(&self, id: &VolumeId, filesystem_uuid: Option<&str>) -> Result<bool, StorageError> {
        require_filesystem(filesystem_uuid)?;
        let mut state = self.usable()?;
        if state.busy {
            return Err(error(ErrorKind::Busy, format!("delete volume {id}: a pod uses it")).into());
        }
        let existed = state.volumes.remove(id).is_some();
        state.pending.remove(id);
        state.count_space();
        state.count_freed();
        drop(state);
        self.report();
        Ok(existed)
    }

    async fn confirm(&self, id: &VolumeId, filesystem_uuid: &str) -> Result<(), StorageError> {
        assert_eq!(filesystem_uuid, fixtures::FILESYSTEM);
        self.usable()?.pending.remove(id);
        Ok(())
    }

    async fn list(&self, only_pending: bool) -> Result<VolumeList, StorageError> {
        let state = self.usable()?;
        let is_listed = |id: &&VolumeId| !only_pending || state.pending.contains_key(*id);
        Ok(VolumeList {
            filesystem_uuid: fixtures::FILESYSTEM.to_owned(),
            volumes: state.volumes.keys().filter(is_listed).cloned().collect(),
            pending: state.pending.clone(),
        })
    }

    /// The largest volume is smaller than the available space, as in the real store. One with settings has half of the size.
    async fn capacity(&self, settings: &BTreeMap<String, String>) -> Result<CapacityResponse, StorageError> {
        let available = self.usable()?.available();
        let largest = available.saturating_sub(Bytes(64 << 10));
        let largest_volume = if settings.is_empty() { largest } else { Bytes(largest.0 / 2) };
        Ok(CapacityResponse { available: available.0, largest_volume: largest_volume.0 })
    }

    async fn take_custody(&self, node_uid: &str) -> Result<Custody, StorageError> {
        let mut state = self.usable()?;
        let present = state.volumes.keys().cloned().collect();
        let record = CustodyRecord::next(state.custody.take(), node_uid, fixtures::FILESYSTEM, &present);
        state.custody = Some(record.clone());
        Ok(record.custody)
    }

    async fn foreign_files(&self) -> Result<Vec<ForeignFiles>, StorageError> {
        Ok(self.usable()?.foreign.clone())
    }
}
