//! The node's storage, and whether it is available: the monitor opens it, and probes write to it and query the loop driver.
//!
//! `docs/decisions/0030-unpublishing-needs-no-disk.md` gives the reasons.

mod metrics;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use loopfs::loop_device::LoopControl;
use loopfs::publish::{PublishOptions, PublishRoot, PublishedDevices, Publisher};
use loopfs::volume_store::{StoreOptions, VolumeStore};
use loopfs::{ErrorKind, FilesystemUuid};
use service::ExponentialBackoff;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::driver::DriverName;
use crate::error::{Error, Result};
use crate::mount_watch::MountWatch;
use crate::{blocking, kubelet_record};

/// The maximum duration of a write to the data disk. After that time the disk counts as hanging. It is less than the
/// ten seconds after which the probes in the manifest time out.
const WRITE_TIMEOUT: Duration = Duration::from_secs(4);

/// The interval at which the driver probes its storage itself.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

const HANG_REMEDY: &str =
    "look for a hanging disk in the kernel log, and whether the file system is frozen (fsfreeze)";

/// Returns an error if a volume that was recorded on `filesystem` cannot be on this node.
pub(crate) fn require_filesystem(publisher: &Publisher, filesystem: Option<FilesystemUuid>) -> Result<()> {
    let here = publisher.store().filesystem_uuid();
    match filesystem {
        Some(of_volume) if of_volume != here => Err(Error::OtherFilesystem { of_volume, present: here }),
        _ => Ok(()),
    }
}

/// Whether the storage is available.
#[derive(Clone, Debug)]
enum StorageAvailability {
    /// The driver has not tried to open the storage yet.
    Starting,
    Available(Arc<Publisher>),
    /// The storage is unavailable for this reason.
    Unavailable(Arc<str>),
    /// No file system was ever mounted at the data directory. That is no failure: a node may have no disk for volumes.
    Absent(Arc<str>),
}

/// Whether the storage can be used, as clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Availability {
    Starting,
    Absent(Arc<str>),
    Unavailable(Arc<str>),
    Available(FilesystemUuid),
}

/// The results of a probe that found no failure.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Starting,
    Ready,
    /// This node never had storage, for this reason. The driver does not register there, so no pod depends on it.
    Absent(Arc<str>),
}

/// Opens the storage when possible, and reports the reason while it is unavailable.
///
/// The process starts, serves calls and responds to probes without its file system, so that administrators learn what
/// is missing. It continues by itself when the file system has been mounted.
#[derive(Debug)]
pub(crate) struct StorageMonitor {
    driver: DriverName,
    data_dir: PathBuf,
    /// The directory below which volumes are published.
    root: Arc<PublishRoot>,
    state: watch::Sender<StorageAvailability>,
    /// Set when the storage is opened for the first time.
    devices: OnceLock<Arc<PublishedDevices>>,
    /// The start of the probe that is in progress. A probe writes to the disk.
    probe_started: watch::Sender<Option<Instant>>,
}

impl StorageMonitor {
    pub(crate) fn new(driver: DriverName, data_dir: PathBuf, root: Arc<PublishRoot>) -> Self {
        Self {
            driver,
            data_dir,
            root,
            state: watch::Sender::new(StorageAvailability::Starting),
            devices: OnceLock::new(),
            probe_started: watch::Sender::new(None),
        }
    }

    /// Returns the storage, even if it has failed since it was opened. Returns an error while its disk hangs. Does not
    /// block.
    pub(crate) fn current(&self) -> Result<Arc<Publisher>> {
        let storage = match &*self.state.borrow() {
            StorageAvailability::Available(storage) => Arc::clone(storage),
            StorageAvailability::Starting => return Err(Error::StorageStarting),
            StorageAvailability::Unavailable(reason) | StorageAvailability::Absent(reason) => {
                return Err(Error::StorageUnavailable(reason.to_string()));
            }
        };
        self.hang_error().map_or(Ok(storage), Err)
    }

    /// Returns the published devices, also while the storage is unavailable. Returns `None` before it was opened.
    pub(crate) fn devices(&self) -> Option<&PublishedDevices> {
        self.devices.get().map(Arc::as_ref)
    }

    /// Returns an error if a probe has waited for the disk for longer than [`WRITE_TIMEOUT`].
    pub(crate) fn hang_error(&self) -> Option<Error> {
        let waited = self.probe_started.borrow().map(|began| began.elapsed())?;
        (waited >= WRITE_TIMEOUT).then(|| self.hang_error_after(waited))
    }

    fn hang_error_after(&self, waited: Duration) -> Error {
        Error::StorageUnavailable(self.hang_reason(waited))
    }

    fn hang_reason(&self, waited: Duration) -> String {
        format!(
            "a write to the data directory {} has not ended for {waited:.0?}; {HANG_REMEDY}",
            self.data_dir.display()
        )
    }

    /// Records the start of a probe. The caller calls this before [`probe`](Self::probe), and drops the returned value
    /// when the probe has finished.
    fn begin_probe(&self) -> ProbeInProgress {
        self.probe_started.send_replace(Some(Instant::now()));
        ProbeInProgress(self.probe_started.clone())
    }

    /// Verifies and returns the storage. Blocks.
    pub(crate) fn verified(&self) -> Result<Arc<Publisher>> {
        self.verify(self.current()?)
    }

    fn verify(&self, storage: Arc<Publisher>) -> Result<Arc<Publisher>> {
        let Err(error) = storage.store().verify() else { return Ok(storage) };
        let reason: Arc<str> = error.to_string().into();
        // Only the storage that failed becomes unavailable, not one that was opened in its place in the meantime.
        let changed = self.state.send_if_modified(|state| match state {
            StorageAvailability::Available(current) if Arc::ptr_eq(current, &storage) => {
                *state = StorageAvailability::Unavailable(Arc::clone(&reason));
                true
            }
            _ => false,
        });
        if changed {
            tracing::error!(%reason, "the storage failed; the driver opens it again when possible");
        }
        Err(Error::StorageUnavailable(reason.to_string()))
    }

    /// Probes the storage, more thoroughly and more slowly than [`verified`](Self::verified). Blocks, without a limit
    /// if the disk hangs.
    fn probe(&self) -> Result<Readiness> {
        let storage = match &*self.state.borrow() {
            StorageAvailability::Available(storage) => Arc::clone(storage),
            StorageAvailability::Starting => return Ok(Readiness::Starting),
            StorageAvailability::Absent(reason) => return Ok(Readiness::Absent(Arc::clone(reason))),
            StorageAvailability::Unavailable(reason) => {
                return Err(Error::StorageUnavailable(reason.to_string()));
            }
        };
        let storage = self.verify(storage)?;
        let unwritable = |error: loopfs::Error| Error::StorageUnavailable(error.to_string());
        storage.store().prove_writable().map_err(unwritable)?;
        // Filesystem volumes are served even if the loop driver does not work.
        storage.devices().loops().verify().map_err(|error| Error::Precondition(error.to_string()))?;
        Ok(Readiness::Ready)
    }

    /// Completes when the disk hangs, with the error to return.
    pub(crate) async fn wait_until_hanging(&self) -> Error {
        let mut since = self.probe_started.subscribe();
        loop {
            let began = *since.borrow_and_update();
            tokio::select! {
                () = reached(began.map(|began| began + WRITE_TIMEOUT)) => return self.hang_error_after(WRITE_TIMEOUT),
                // The sender lives as long as `self`, so this is not an error.
                changed = since.changed() => drop(changed),
            }
        }
    }

    /// Returns whether the storage can be used now. A disk that hangs counts as unavailable.
    pub(crate) fn availability(&self) -> Availability {
        match &*self.state.borrow() {
            StorageAvailability::Starting => Availability::Starting,
            StorageAvailability::Absent(reason) => Availability::Absent(Arc::clone(reason)),
            StorageAvailability::Unavailable(reason) => Availability::Unavailable(Arc::clone(reason)),
            StorageAvailability::Available(_) if self.hang_error().is_some() => {
                Availability::Unavailable(self.hang_reason(WRITE_TIMEOUT).into())
            }
            StorageAvailability::Available(storage) => {
                Availability::Available(storage.store().filesystem_uuid())
            }
        }
    }

    /// Completes when the availability differs from the known one.
    pub(crate) async fn wait_until_other_than(&self, known: &Availability) {
        let (mut state, mut probes) = (self.state.subscribe(), self.probe_started.subscribe());
        loop {
            let began = *probes.borrow_and_update();
            drop(state.borrow_and_update());
            // Before the availability is read, or a disk that begins to hang in between would not be noticed.
            let now = Instant::now();
            if self.availability() != *known {
                return;
            }
            let hangs_at = began.map(|began| began + WRITE_TIMEOUT).filter(|hangs_at| *hangs_at > now);
            // The senders live as long as `self`.
            tokio::select! {
                () = reached(hangs_at) => {}
                changed = state.changed() => drop(changed),
                changed = probes.changed() => drop(changed),
            }
        }
    }

    /// Completes when the storage is available.
    pub(crate) async fn wait_until_available(&self) {
        let mut state = self.state.subscribe();
        // The sender lives as long as `self`.
        drop(state.wait_for(|state| matches!(state, StorageAvailability::Available(_))).await);
    }

    /// Completes when the storage is available and its disk does not hang.
    pub(crate) async fn wait_until_usable(&self) {
        let mut probes = self.probe_started.subscribe();
        loop {
            probes.borrow_and_update();
            self.wait_until_available().await;
            if self.hang_error().is_none() {
                return;
            }
            // The probe that hangs has to end. The sender lives as long as `self`.
            drop(probes.changed().await);
        }
    }

    /// Completes when this node is known to have storage, whether or not it is available.
    pub(crate) async fn wait_until_present(&self) {
        let mut state = self.state.subscribe();
        let is_present = |state: &StorageAvailability| {
            matches!(state, StorageAvailability::Available(_) | StorageAvailability::Unavailable(_))
        };
        drop(state.wait_for(is_present).await);
    }

    /// Completes when the storage is unavailable.
    pub(crate) async fn wait_until_unavailable(&self) {
        let mut state = self.state.subscribe();
        drop(state.wait_for(|state| !matches!(state, StorageAvailability::Available(_))).await);
    }

    /// Opens the storage, and opens it again after each failure, until `stop`.
    pub(crate) async fn keep_open(self: Arc<Self>, stop: CancellationToken) -> anyhow::Result<()> {
        let mounts = MountWatch::new()?;
        let mut backoff = ExponentialBackoff::default();
        let mut logged = None;
        loop {
            if stop.run_until_cancelled(self.wait_until_unavailable()).await.is_none() {
                return Ok(());
            }
            match self.open_or_report_hang().await {
                Ok(storage) => {
                    tracing::info!(
                        data_dir = %self.data_dir.display(),
                        filesystem = %storage.store().filesystem_uuid(),
                        "the storage is available"
                    );
                    self.state.send_replace(StorageAvailability::Available(Arc::new(storage)));
                    backoff.reset();
                    logged = None;
                    continue;
                }
                Err(error) => {
                    if logged.as_ref() != Some(&error) {
                        error.log();
                        logged = Some(error.clone());
                    }
                    self.state.send_replace(error.into());
                }
            }
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                changed = mounts.changed() => changed?,
                () = tokio::time::sleep(backoff.next_delay()) => {}
            }
        }
    }

    /// Opens the storage. While the disk hangs, the storage counts as unavailable: the driver registers, and volumes can be
    /// unpublished.
    async fn open_or_report_hang(&self) -> Result<Publisher, OpenError> {
        let mut opening = std::pin::pin!(self.open());
        if let Ok(opened) = timeout(WRITE_TIMEOUT, &mut opening).await {
            return opened;
        }
        let reason = format!(
            "opening the data directory {} has not ended for {WRITE_TIMEOUT:?}; {HANG_REMEDY}",
            self.data_dir.display()
        );
        tracing::error!(%reason, "volumes cannot be served; the driver still waits for the disk");
        // A node that has no storage is not registered because its root disk is slow.
        self.state.send_if_modified(|state| {
            let is_known = !matches!(state, StorageAvailability::Absent(_));
            if is_known {
                *state = StorageAvailability::Unavailable(reason.into());
            }
            is_known
        });
        opening.await
    }

    /// Opens the storage. Keeps what an earlier call has opened: the pool of idle devices, and the published devices.
    async fn open(&self) -> Result<Publisher, OpenError> {
        let data_dir = self.data_dir.clone();
        let known = self.devices.get().cloned();
        let (driver, root) = (self.driver.clone(), Arc::clone(&self.root));
        let opened = tokio::task::spawn_blocking(move || {
            let store = VolumeStore::open(&data_dir, StoreOptions::default())?;
            store.verify()?;
            if let Some(devices) = known {
                return Ok(Publisher::reopened(store, devices, root));
            }
            // A call that unmounts a target in between cleans up afterwards.
            let loops = LoopControl::open()?;
            let options = PublishOptions::default()
                .owner(move |path| kubelet_record::owner(path, &driver))
                .report(|note| tracing::warn!("{note}"));
            Ok(Publisher::open(store, loops, root, options)?)
        });
        match opened.await {
            Ok(Ok(storage)) => {
                // Only the first one is set, and later ones are the same.
                self.devices.set(Arc::clone(storage.devices())).ok();
                Ok(storage)
            }
            Ok(Err(error)) => {
                let error: Error = error;
                let absent =
                    matches!(&error, Error::Storage(error) if error.kind() == ErrorKind::NeverMounted);
                Err(OpenError { reason: error.to_string().into(), absent })
            }
            Err(panic) => {
                Err(OpenError { reason: format!("a defect of the driver: {panic}").into(), absent: false })
            }
        }
    }
}

/// The reason why the storage could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
struct OpenError {
    reason: Arc<str>,
    /// No file system was ever mounted at the data directory.
    absent: bool,
}

impl OpenError {
    fn log(&self) {
        let Self { reason, absent } = self;
        if *absent {
            tracing::warn!(
                %reason,
                "this node has no storage; the driver registers once a file system is mounted at the data directory"
            );
        } else {
            tracing::error!(
                %reason,
                "volumes cannot be served; the driver tries again after each change of a mount and at intervals"
            );
        }
    }
}

impl From<OpenError> for StorageAvailability {
    fn from(OpenError { reason, absent }: OpenError) -> Self {
        if absent { Self::Absent(reason) } else { Self::Unavailable(reason) }
    }
}

/// Completes at this time, if there is one.
async fn reached(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// A probe that is in progress until this is dropped.
#[derive(Debug)]
struct ProbeInProgress(watch::Sender<Option<Instant>>);

impl Drop for ProbeInProgress {
    fn drop(&mut self) {
        self.0.send_replace(None);
    }
}

/// Runs probes, one at a time.
#[derive(Debug)]
pub(crate) struct Probe {
    monitor: Arc<StorageMonitor>,
    timeout: Duration,
    /// The probe that is in progress. There is one at a time, because each would block a thread while the disk hangs.
    running: Mutex<Option<RunningProbe>>,
}

#[derive(Debug)]
struct RunningProbe {
    since: Instant,
    outcome: JoinHandle<Result<Readiness>>,
}

impl Probe {
    pub(crate) fn new(monitor: Arc<StorageMonitor>) -> Self {
        Self { monitor, timeout: WRITE_TIMEOUT, running: Mutex::default() }
    }

    /// Probes the storage every [`PROBE_INTERVAL`]. Calls that do not detect a failure themselves then
    /// return its error, where they would otherwise block on a hanging disk.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut failed = false;
        loop {
            // A disk that hangs from the start is detected as soon as the storage is open, which needs no write.
            self.monitor.wait_until_present().await;
            match self.health().await {
                Ok(_) => failed = false,
                Err(error) => {
                    if !failed {
                        tracing::error!(%error, "the storage probe failed; volumes cannot be served");
                    }
                    failed = true;
                }
            }
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
    }

    /// Returns whether volumes can be served, or the reason why not.
    pub(crate) async fn health(&self) -> Result<Readiness> {
        let monitor = Arc::clone(&self.monitor);
        self.run_shared(move || monitor.probe()).await
    }

    async fn run_shared(
        &self,
        run_shared: impl FnOnce() -> Result<Readiness> + Send + 'static,
    ) -> Result<Readiness> {
        // The caller that holds the mutex waits for a probe that is in progress.
        let Ok(mut running) = tokio::time::timeout(self.timeout, self.running.lock()).await else {
            return Err(self.monitor.hang_error_after(self.timeout));
        };
        let current = running.get_or_insert_with(|| {
            // The monitor counts the probe as in progress for exactly as long as it runs, even if no caller waits for
            // it.
            let in_progress = self.monitor.begin_probe();
            let run_shared = move || {
                let _in_progress = in_progress;
                run_shared()
            };
            RunningProbe { since: Instant::now(), outcome: tokio::spawn(blocking::run(run_shared)) }
        });
        let Ok(outcome) = tokio::time::timeout(self.timeout, &mut current.outcome).await else {
            return Err(self.monitor.hang_error_after(current.since.elapsed()));
        };
        *running = None;
        outcome?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    /// Each probe reports the hanging disk.
    #[tokio::test]
    async fn hanging_disk_blocks_only_one_thread() {
        let root = Arc::new(loopfs::publish::PublishRoot::open(std::path::Path::new("/")).unwrap());
        let monitor =
            Arc::new(StorageMonitor::new("csi.loopfs.dev".parse().unwrap(), "/nowhere".into(), root));
        let probe = Probe { timeout: Duration::from_millis(50), ..Probe::new(monitor) };
        let (release, release_receiver) = mpsc::channel::<()>();
        let release_receiver = Arc::new(std::sync::Mutex::new(release_receiver));
        let begun = Arc::new(AtomicUsize::new(0));
        let (begin, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let hanging = || {
            let (release_receiver, begun) = (Arc::clone(&release_receiver), Arc::clone(&begun));
            let begin = begin.clone();
            move || {
                begun.fetch_add(1, Ordering::Relaxed);
                begin.send(()).unwrap();
                release_receiver.lock().unwrap().recv().ok();
                Ok(Readiness::Ready)
            }
        };
        for _ in 0..3 {
            let error = probe.run_shared(hanging()).await.unwrap_err();
            assert!(error.to_string().contains("has not ended"), "{error}");
        }
        // The thread may be late.
        let first = tokio::time::timeout(Duration::from_secs(60), begins.recv());
        first.await.expect("a probe begins");
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        release.send(()).unwrap();
        let slow = Probe { timeout: Duration::from_secs(60), ..probe };
        assert_eq!(
            slow.run_shared(hanging()).await.unwrap(),
            Readiness::Ready,
            "the probe in progress is awaited"
        );
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        release.send(()).unwrap();
        assert_eq!(slow.run_shared(hanging()).await.unwrap(), Readiness::Ready);
        assert_eq!(begun.load(Ordering::Relaxed), 2);
    }
}
