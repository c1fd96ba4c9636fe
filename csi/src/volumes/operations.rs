//! Runs the work of both services on volumes and snapshots. The work runs on blocking threads, under the locks of its
//! objects.
//!
//! If the data disk hangs, each call that accesses it blocks a thread and keeps the lock of its volume. Unpublishing must
//! succeed even then, because otherwise a pod could not stop. It therefore takes none of the locks that such a call can
//! hold, except that of its target path, and leaves the work that needs the disk to a task of its own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use loopfs::publish::{Cleanup, ClearedTarget};
use loopfs::volume_store::VolumeId;
use service::ExponentialBackoff;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::publish::Volumes;
use super::unavailable;
use crate::background::ForegroundCalls;
use crate::blocking;
use crate::error::{Error, Result};
use crate::locks::{LockMode, OperationObject, VolumeLocks};
use crate::request::{Publish, Stage, TargetPath, Unpublish, Unstage};
use crate::storage::StorageMonitor;

/// The maximum number of threads in calls that access the disk. The runtime has 512 threads; the others serve calls
/// that do not access the disk.
const DISK_THREADS: usize = 256;

/// The maximum number of those threads that clean up after unpublish calls, without those that have done so for longer than
/// [`CLEANUP_TIMEOUT`].
const CLEANUP_THREADS: usize = 16;

/// How long an unpublish call waits for the cleanup of its volume. The kubelet's timeout is two minutes.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);

/// The volumes, and the locks of the operations that are in progress on them.
#[derive(Clone, Debug)]
pub(crate) struct VolumeOperations {
    locks: VolumeLocks,
    volumes: Arc<Volumes>,
    monitor: Arc<StorageMonitor>,
    foreground: Arc<ForegroundCalls>,
    /// Limits the threads of some callers among those of all.
    own_threads: Option<Arc<Semaphore>>,
    disk_threads: Arc<Semaphore>,
    cleanup_threads: Arc<Semaphore>,
    /// The volumes whose cleanup a task repeats. Entries change while the volume is locked.
    repeated: Arc<Mutex<HashMap<VolumeId, Repetition>>>,
}

/// A task that repeats the cleanup of a volume.
#[derive(Debug)]
struct Repetition {
    why: Repeated,
    /// Cancelled when the cleanup is not needed any more.
    needed: CancellationToken,
}

/// Why the cleanup of a volume is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repeated {
    /// It failed.
    Failed,
    /// A process may cancel the deferred detach of a device.
    DetachDeferred,
}

impl VolumeOperations {
    pub(crate) fn new(
        volumes: Volumes,
        monitor: Arc<StorageMonitor>,
        foreground: Arc<ForegroundCalls>,
    ) -> Self {
        Self {
            foreground,
            own_threads: None,
            locks: VolumeLocks::default(),
            volumes: Arc::new(volumes),
            monitor,
            disk_threads: Arc::new(Semaphore::new(DISK_THREADS)),
            cleanup_threads: Arc::new(Semaphore::new(CLEANUP_THREADS)),
            repeated: Arc::default(),
        }
    }

    /// Returns the same operations for callers of which at most this many access the disk at the same time.
    pub(crate) fn limited(&self, threads: usize) -> Self {
        Self { own_threads: Some(Arc::new(Semaphore::new(threads))), ..self.clone() }
    }

    /// Runs work that changes a volume, under its lock.
    pub(crate) async fn exclusive<T: Send + 'static>(
        &self,
        volume: &VolumeId,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.locked([(volume.clone().into(), LockMode::Change)], work).await
    }

    /// Runs work under these locks.
    pub(crate) async fn locked<T: Send + 'static>(
        &self,
        wanted: impl IntoIterator<Item = (OperationObject, LockMode)>,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let lock = self.locks.try_acquire(wanted)?;
        self.run(move |volumes| {
            let _lock = lock;
            work(volumes)
        })
        .await
    }

    /// Runs work that changes nothing, without locks. Returns an error as soon as the disk hangs.
    pub(crate) async fn unlocked<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if self.monitor.hang_error().is_some() {
            // The work detects the failure too, and returns the information that is available without the disk.
            return self.run(work).await;
        }
        tokio::select! {
            outcome = self.run(work) => outcome,
            error = self.monitor.wait_until_hanging() => Err(error),
        }
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        // An error would mean that the semaphore is closed, and it is never closed.
        let own_thread = match &self.own_threads {
            Some(threads) => Some(Arc::clone(threads).acquire_owned().await),
            None => None,
        };
        let thread = Arc::clone(&self.disk_threads).acquire_owned().await;
        let (volumes, call) = (Arc::clone(&self.volumes), self.foreground.enter());
        blocking::run(move || {
            let (_own_thread, _thread, _call) = (own_thread, thread, call);
            work(&volumes)
        })
        .await
    }

    pub(crate) async fn publish(&self, publish: Publish) -> Result<()> {
        let wanted =
            [(publish.volume.clone().into(), LockMode::Change), (target(&publish.target), LockMode::Change)];
        let work = self.clone();
        self.locked(wanted, move |volumes| {
            volumes.publish(&publish)?;
            work.keep_devices(&publish.volume);
            Ok(())
        })
        .await
    }

    pub(crate) async fn stage(&self, stage: Stage) -> Result<()> {
        let work = self.clone();
        let volume = stage.volume.clone();
        self.exclusive(&volume, move |volumes| {
            volumes.stage(&stage)?;
            work.keep_devices(&stage.volume);
            Ok(())
        })
        .await
    }

    /// Unstages the volume. Without the disk, a volume that has no device is unstaged already. A call that stages it may still hang and
    /// attach a device later, so a cleanup waits for the disk.
    pub(crate) async fn unstage(&self, unstage: Unstage) -> Result<()> {
        let (work, volume) = (self.clone(), unstage.volume.clone());
        let unstaging = self.exclusive(&volume, move |volumes| {
            if volumes.unstage(&unstage)? == Cleanup::DetachDeferred {
                work.repeat_clean_up(&unstage.volume, ClearedTarget::default(), Repeated::DetachDeferred);
            }
            Ok(())
        });
        let ended = tokio::select! {
            ended = unstaging => ended,
            error = self.monitor.wait_until_hanging() => Err(error),
        };
        // Also if another call, which waits for the disk, has the volume locked.
        match (ended, self.monitor.current()) {
            (Err(_), Err(Error::StorageUnavailable(reason))) => {
                let (of, monitor) = (volume.clone(), Arc::clone(&self.monitor));
                blocking::run(move || unavailable::require_detached(&of, monitor.devices(), &reason)).await?;
                self.repeat_clean_up(&volume, ClearedTarget::default(), Repeated::Failed);
                Ok(())
            }
            (ended, _) => ended,
        }
    }

    /// Unpublishes the volume from its target, and then cleans up if the volume is not published anywhere else. If the
    /// disk hangs or the storage is unavailable, returns before the cleanup, which continues when the storage is usable. Also returns
    /// if the cleanup takes longer than [`CLEANUP_TIMEOUT`]: the pod has ended.
    pub(crate) async fn unpublish(&self, unpublish: Unpublish) -> Result<()> {
        let (work, volume) = (self.clone(), unpublish.volume.clone());
        // A separate task, because the call may be cancelled between the two steps.
        let clearing = tokio::spawn(async move { work.clear(unpublish).await }.in_current_span());
        let cleanup = clearing.await??;
        tokio::select! {
            _ended = cleanup => {}
            error = self.monitor.wait_until_hanging() => {
                tracing::warn!(%error, "the target is unmounted and removed; the cleanup of its volume continues when the data disk accepts writes again");
            }
            () = self.monitor.wait_until_unavailable() => {
                tracing::warn!("the target is unmounted and removed; the cleanup of its volume continues when the storage is available again");
            }
            // A device whose user changes it, or another call for the volume.
            () = tokio::time::sleep(CLEANUP_TIMEOUT) => {
                tracing::warn!(%volume, "the target is unmounted and removed; the cleanup of its volume takes longer than {CLEANUP_TIMEOUT:?} and continues");
            }
        }
        Ok(())
    }

    /// Clears the target, and starts the cleanup of the volume.
    async fn clear(self, unpublish: Unpublish) -> Result<JoinHandle<()>> {
        let lock = self.locks.try_acquire([(target(&unpublish.target), LockMode::Change)])?;
        let volumes = Arc::clone(&self.volumes);
        let volume = unpublish.volume.clone();
        let cleared = blocking::run(move || {
            let _lock = lock;
            volumes.clear_target(&unpublish.target)
        });
        let cleared = cleared.await?;
        if self.monitor.current().is_err() {
            // Nothing waits for it: the last close of a device can write to a disk that hangs.
            let (volumes, volume) = (Arc::clone(&self.volumes), volume.clone());
            tokio::task::spawn_blocking(move || volumes.release_unmounted(&volume));
        }
        let cleaning = async move {
            self.clean_up(&volume, cleared, None).await;
        };
        Ok(tokio::spawn(cleaning.in_current_span()))
    }

    /// Starts a task that cleans up until no device is left, unless there is one for the volume: no other call does it, and the volume
    /// could not be deleted. The volume is locked, unless the cleanup has failed.
    fn repeat_clean_up(&self, volume: &VolumeId, cleared: ClearedTarget, why: Repeated) {
        let needed = CancellationToken::new();
        match self.lock_repeated().entry(volume.clone()) {
            Entry::Occupied(mut repetition) => {
                if why == Repeated::Failed {
                    repetition.get_mut().why = why;
                }
                return;
            }
            Entry::Vacant(entry) => entry.insert(Repetition { why, needed: needed.clone() }),
        };
        let (work, volume) = (self.clone(), volume.clone());
        let repeat = async move {
            let mut backoff = ExponentialBackoff::default();
            loop {
                // Not at once: the next workload of the volume may start, and its calls would be refused in the meantime.
                tokio::time::sleep(backoff.next_delay()).await;
                if needed.is_cancelled() || work.clean_up(&volume, cleared, Some(&needed)).await {
                    return;
                }
            }
        };
        tokio::spawn(repeat.in_current_span());
    }

    /// Cleans up after an unpublish call as soon as the storage is usable. Until then, the volume is not locked. A task repeats the cleanup
    /// if necessary. `repetition` is that of the calling task, which does so itself if this returns `false`.
    async fn clean_up(
        &self,
        volume: &VolumeId,
        cleared: ClearedTarget,
        repetition: Option<&CancellationToken>,
    ) -> bool {
        loop {
            self.monitor.wait_until_usable().await;
            let lock = self.locks.acquire(volume.clone().into(), LockMode::Change).await;
            // Neither is held while this task waits for the other: a volume that is locked for long must not keep the threads, and a
            // cleanup that waits for a thread must not have calls for its volume refused.
            let Ok(thread) = Arc::clone(&self.cleanup_threads).try_acquire_owned() else {
                drop(lock);
                drop(self.cleanup_threads.acquire().await);
                continue;
            };
            if repetition.is_some_and(CancellationToken::is_cancelled) {
                return true;
            }
            if self.monitor.current().is_err() {
                continue;
            }
            let (work, id, is_repetition) = (self.clone(), volume.clone(), repetition.is_some());
            let mut cleaned = pin!(self.run(move |volumes| {
                let _lock = lock;
                let cleaned = volumes.clean_up(&id, &cleared);
                Ok(work.plan_repetition(&id, cleared, cleaned, is_repetition))
            }));
            let cleaned = match timeout(CLEANUP_TIMEOUT, cleaned.as_mut()).await {
                Ok(cleaned) => cleaned,
                Err(_) => {
                    // It waits for a device that a pod keeps locked. A pod with many of them must not stop the other cleanups.
                    drop(thread);
                    cleaned.await
                }
            };
            let has_ended = cleaned.unwrap_or_else(|panic| {
                self.plan_repetition(volume, cleared, Err(panic), repetition.is_some())
            });
            if let Some(has_ended) = has_ended {
                return has_ended;
            }
        }
    }

    /// Decides whether the cleanup of a volume, which is locked, is repeated. Returns `None` if it waits for the storage, and `true` if it is
    /// complete.
    fn plan_repetition(
        &self,
        volume: &VolumeId,
        cleared: ClearedTarget,
        cleaned: Result<Cleanup>,
        is_repetition: bool,
    ) -> Option<bool> {
        let why = match cleaned {
            Ok(Cleanup::Complete) => {
                if is_repetition {
                    self.lock_repeated().remove(volume);
                }
                return Some(true);
            }
            Ok(Cleanup::DetachDeferred) => Repeated::DetachDeferred,
            Err(Error::StorageUnavailable(_)) => return None,
            Err(error) => {
                tracing::warn!(%volume, %error, "the target is unmounted and removed, but the cleanup of its volume failed; it is repeated");
                Repeated::Failed
            }
        };
        if !is_repetition {
            self.repeat_clean_up(volume, cleared, why);
        } else if let Some(repetition) = self.lock_repeated().get_mut(volume) {
            repetition.why = why;
        }
        Some(false)
    }

    /// Ends the repetition of a deferred detach, because the volume, which is locked, is used again: its device must stay, and that use
    /// ends with a cleanup.
    fn keep_devices(&self, volume: &VolumeId) {
        let mut repeated = self.lock_repeated();
        if let Entry::Occupied(repetition) = repeated.entry(volume.clone())
            && repetition.get().why == Repeated::DetachDeferred
        {
            repetition.remove().needed.cancel();
        }
    }

    fn lock_repeated(&self) -> MutexGuard<'_, HashMap<VolumeId, Repetition>> {
        // Every critical section is a single operation, so a panicked holder leaves the map whole.
        self.repeated.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn target(path: &TargetPath) -> OperationObject {
    OperationObject::Target(path.relative().to_owned())
}
