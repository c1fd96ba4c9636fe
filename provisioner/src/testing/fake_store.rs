//! A fake volume store in memory, with the failures that this crate's tests need.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use loopfs::volume_store::{
    ContentSource, ForeignEvidence, ForeignFiles, SnapshotId, Space, StoreCounts, VolumeId, VolumeKind,
    VolumeSpec,
};
use loopfs::{Bytes, ErrorKind};

use crate::{
    store::{
        claim_record::ClaimRecord,
        volumes::{VolumeBackend, VolumeError},
    },
    testing::fixtures,
};

/// A store of a given size. Deleted volumes occupy their space until the trash is emptied, as in the real store.
pub(crate) struct FakeStore {
    state: Mutex<FakeStoreState>,
    once_created: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    copies: CopyBarrier,
}

/// A barrier for concurrent copies.
#[derive(Default)]
struct CopyBarrier {
    wanted: AtomicUsize,
    arrived: Mutex<usize>,
    arrival: Condvar,
}

impl CopyBarrier {
    fn wait(&self) {
        let mut arrived = self.arrived.lock().unwrap();
        *arrived += 1;
        self.arrival.notify_all();
        let wanted = self.wanted.load(Ordering::Relaxed);
        drop(self.arrival.wait_timeout_while(arrived, Duration::from_secs(60), |arrived| *arrived < wanted));
    }
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
    pub(crate) trash: Vec<Bytes>,
    /// The result of a search for foreign files.
    pub(crate) foreign: Vec<ForeignFiles>,
    /// The error of all operations.
    pub(crate) broken: Option<VolumeError>,
    /// Deleting a volume fails, because it is in use.
    pub(crate) busy: bool,
    /// The CSI driver refreshes the capacity of loop devices.
    pub(crate) refreshed: bool,
}

impl FakeStore {
    pub(crate) fn of_size(size: Bytes) -> Self {
        FakeStore {
            state: Mutex::new(FakeStoreState { size, ..FakeStoreState::default() }),
            once_created: Mutex::default(),
            copies: CopyBarrier::default(),
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, FakeStoreState> {
        self.state.lock().unwrap()
    }

    /// Calls a function when the next volume was created, before `create` returns.
    #[cfg(feature = "apiserver-tests")]
    pub(crate) fn once_created(&self, happen: impl FnOnce() + Send + 'static) {
        *self.once_created.lock().unwrap() = Some(Box::new(happen));
    }

    /// Makes each copy wait until `wanted` copies are in progress.
    pub(crate) fn wait_for_copies(&self, wanted: usize) {
        self.copies.wanted.store(wanted, Ordering::Relaxed);
    }

    /// Returns how many copies have begun.
    pub(crate) fn copies_begun(&self) -> usize {
        *self.copies.arrived.lock().unwrap()
    }

    pub(crate) fn capacity(&self, id: &str) -> Option<Bytes> {
        self.state().volumes.get(&VolumeId::parse(id).unwrap()).map(|(_, capacity)| *capacity)
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
        let capacities = self.volumes.values().map(|(_, capacity)| capacity.0);
        let taken: u64 = capacities.chain(self.trash.iter().map(|size| size.0)).sum();
        Bytes(self.size.0 - taken)
    }
}

pub(crate) fn error(kind: ErrorKind, message: impl Into<String>) -> VolumeError {
    VolumeError { kind, message: message.into() }
}

impl VolumeBackend for FakeStore {
    fn filesystem_uuid(&self) -> String {
        fixtures::FILESYSTEM.to_owned()
    }

    fn verify(&self) -> Result<(), VolumeError> {
        self.state().broken.clone().map_or(Ok(()), Err)
    }

    fn recover(&self) -> Result<String, VolumeError> {
        Ok("nothing".to_owned())
    }

    fn holds_earlier_data(&self, id: &VolumeId) -> Result<bool, VolumeError> {
        let state = self.state();
        let exists = state.volumes.contains_key(id) && !state.pending.contains_key(id);
        Ok(exists && state.with_data.contains(id))
    }

    fn pending(&self) -> Result<BTreeMap<VolumeId, ClaimRecord>, VolumeError> {
        Ok(self.state().pending.clone())
    }

    fn confirm(&self, id: &VolumeId) -> Result<(), VolumeError> {
        self.state().pending.remove(id);
        Ok(())
    }

    fn create(&self, id: &VolumeId, spec: &VolumeSpec) -> Result<Bytes, VolumeError> {
        let capacity = spec.capacity.round_up().unwrap();
        let mut state = self.state();
        match state.volumes.get(id) {
            Some((kind, existing)) if *kind == spec.kind && *existing >= capacity => return Ok(*existing),
            Some(_) => {
                return Err(error(
                    ErrorKind::AlreadyExists,
                    format!("volume {id} exists with another kind or size"),
                ));
            }
            None => state.require(id, capacity)?,
        }
        state.volumes.insert(id.clone(), (spec.kind, capacity));
        if spec.pending {
            let record = ClaimRecord::parse(&spec.annotations).expect("the annotations of a claim");
            state.pending.insert(id.clone(), record);
        }
        drop(state);
        if let Some(happen) = self.once_created.lock().unwrap().take() {
            happen();
        }
        Ok(capacity)
    }

    fn clone_from(
        &self,
        source: ContentSource<'_>,
        id: &VolumeId,
        spec: &VolumeSpec,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Bytes, VolumeError> {
        let kind = match source {
            ContentSource::Volume(source) => self.state().volumes.get(source).map(|(kind, _)| *kind),
            ContentSource::Snapshot(source) => self.state().snapshots.get(source).copied(),
        };
        match kind {
            None => return Err(error(ErrorKind::NotFound, format!("{source} does not exist"))),
            Some(kind) if kind != spec.kind => {
                return Err(error(ErrorKind::InvalidInput, format!("{source} is a {kind} volume")));
            }
            Some(_) => {}
        }
        self.copies.wait();
        if !is_wanted() {
            return Err(error(ErrorKind::Other, format!("{source}: the caller ended the copy")));
        }
        if self.state().busy {
            return Err(error(
                ErrorKind::Busy,
                format!("{source}: directories were moved while they were copied"),
            ));
        }
        let capacity = self.create(id, spec)?;
        self.state().copies.insert(id.clone(), source.to_string());
        Ok(capacity)
    }

    fn expand(&self, id: &VolumeId, to: Bytes) -> Result<Bytes, VolumeError> {
        let to = to.round_up().unwrap();
        let mut state = self.state();
        let Some((kind, existing)) = state.volumes.get(id).copied() else {
            return Err(error(ErrorKind::NotFound, format!("volume {id} does not exist")));
        };
        if to > existing {
            state.require(id, to.saturating_sub(existing))?;
            state.volumes.insert(id.clone(), (kind, to));
        }
        Ok(to.max(existing))
    }

    fn wait_for_device_size(&self, _: &VolumeId, _: Bytes, _: Duration) -> Result<bool, VolumeError> {
        Ok(self.state().refreshed)
    }

    fn delete(&self, id: &VolumeId) -> Result<bool, VolumeError> {
        let mut state = self.state();
        if state.busy {
            return Err(error(ErrorKind::Busy, format!("delete volume {id}: a pod uses it")));
        }
        let deleted = state.volumes.remove(id);
        state.pending.remove(id);
        state.trash.extend(deleted.map(|(_, capacity)| capacity));
        Ok(deleted.is_some())
    }

    fn list(&self) -> Result<Vec<VolumeId>, VolumeError> {
        Ok(self.state().volumes.keys().cloned().collect())
    }

    fn space(&self) -> Result<Space, VolumeError> {
        let state = self.state();
        let mut space = Space::default();
        space.total = state.size;
        space.available = state.available();
        space.reserved = space.total.saturating_sub(space.available);
        Ok(space)
    }

    fn counts(&self) -> Result<StoreCounts, VolumeError> {
        let state = self.state();
        let of = |wanted| state.volumes.values().filter(|(kind, _)| *kind == wanted).count();
        let mut counts = StoreCounts::default();
        counts.directories = of(VolumeKind::Filesystem);
        counts.images = of(VolumeKind::Block);
        counts.trash = state.trash.len();
        Ok(counts)
    }

    fn empty_trash(&self, _yield_now: &mut dyn FnMut()) -> Result<usize, VolumeError> {
        Ok(std::mem::take(&mut self.state().trash).len())
    }

    fn foreign_evidence(&self) -> Result<ForeignEvidence, VolumeError> {
        Ok(ForeignEvidence::default())
    }

    fn find_foreign_files(
        &self,
        volumes: Option<&BTreeSet<VolumeId>>,
        _yield_now: &mut dyn FnMut(),
    ) -> Result<Vec<ForeignFiles>, VolumeError> {
        let is_searched =
            |files: &&ForeignFiles| volumes.is_none_or(|volumes| volumes.contains(&files.volume));
        Ok(self.state().foreign.iter().filter(is_searched).cloned().collect())
    }

    fn repair_project(&self, id: &VolumeId) -> Result<u64, VolumeError> {
        let mut state = self.state();
        let repaired = state.foreign.extract_if(.., |files| files.volume == *id);
        Ok(repaired.map(|files| files.names).sum())
    }
}
