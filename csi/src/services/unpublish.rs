//! Unpublishes and unstages volumes.
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

use super::rpc::{VolumeOperations, Volumes};
use super::unavailable;
use crate::blocking;
use crate::error::{Error, Result};
use crate::locks::LockMode;
use crate::request::TargetPath;

/// The maximum number of threads that clean up after unpublish calls, without those that have done so for longer than
/// [`CLEANUP_TIMEOUT`].
const CLEANUP_THREADS: usize = 16;

/// How long an unpublish call waits for the cleanup of its volume. The kubelet's timeout is two minutes.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);

/// The cleanups of volumes that are not published any more.
#[derive(Clone, Debug)]
pub(super) struct Cleanups {
    operations: VolumeOperations,
    threads: Arc<Semaphore>,
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

impl Cleanups {
    pub(super) fn new(operations: VolumeOperations) -> Self {
        Self { operations, threads: Arc::new(Semaphore::new(CLEANUP_THREADS)), repeated: Arc::default() }
    }

    /// Unstages the volume: detaches the devices of a volume that is published nowhere. Without the disk, a volume that has no device is
    /// unstaged already. A call that stages it may still hang and attach a device later, so a cleanup waits for the disk.
    pub(super) async fn unstage(&self, volume: VolumeId) -> Result<()> {
        let (cleanups, id) = (self.clone(), volume.clone());
        let locks = [(volume.clone().into(), LockMode::Change)];
        let unstaging = self.operations.locked_unless_hanging(locks, move |volumes| {
            let publisher = volumes.monitor.current()?;
            let detached = publisher.detach(&id).map_err(|error| storage_error_or(volumes, error))?;
            if detached == Cleanup::DetachDeferred {
                cleanups.repeat_clean_up(&id, ClearedTarget::default(), Repeated::DetachDeferred);
            }
            Ok(())
        });
        let (ended, monitor) = (unstaging.await, &self.operations.volumes.monitor);
        // Also if another call, which waits for the disk, has the volume locked.
        match (ended, monitor.current()) {
            (Err(_), Err(Error::StorageUnavailable(reason))) => {
                let (of, monitor) = (volume.clone(), Arc::clone(monitor));
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
    pub(super) async fn unpublish(&self, volume: VolumeId, target: TargetPath) -> Result<()> {
        let clearing = self.clone().clear(volume.clone(), target);
        // A separate task, because the call may be cancelled between the two steps.
        let cleanup = tokio::spawn(clearing.in_current_span()).await??;
        let monitor = &self.operations.volumes.monitor;
        tokio::select! {
            _ended = cleanup => {}
            error = monitor.wait_until_hanging() => {
                tracing::warn!(%error, "the target is unmounted and removed; the cleanup of its volume continues when the data disk accepts writes again");
            }
            () = monitor.wait_until_unavailable() => {
                tracing::warn!("the target is unmounted and removed; the cleanup of its volume continues when the storage is available again");
            }
            // A device whose user changes it, or another call for the volume.
            () = tokio::time::sleep(CLEANUP_TIMEOUT) => {
                tracing::warn!(%volume, "the target is unmounted and removed; the cleanup of its volume takes longer than {CLEANUP_TIMEOUT:?} and continues");
            }
        }
        Ok(())
    }

    /// Unmounts and removes the target, whatever is mounted there and even if the volume or the storage no longer exists: an
    /// orchestrator has no other way to stop a workload. Then starts the cleanup of the volume.
    async fn clear(self, volume: VolumeId, target: TargetPath) -> Result<JoinHandle<()>> {
        let VolumeOperations { locks, volumes, .. } = &self.operations;
        let lock = locks.try_acquire([((&target).into(), LockMode::Change)])?;
        let root = Arc::clone(&volumes.root);
        let cleared = blocking::run(move || {
            let _lock = lock;
            Ok(root.clear(target.relative())?)
        });
        let cleared = cleared.await?;
        if volumes.monitor.current().is_err() {
            // Nothing waits for it: the last close of a device can write to a disk that hangs.
            let (volumes, volume) = (Arc::clone(volumes), volume.clone());
            tokio::task::spawn_blocking(move || release_unmounted(&volumes, &volume));
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
        let (cleanups, volume) = (self.clone(), volume.clone());
        let repeat = async move {
            let mut backoff = ExponentialBackoff::default();
            loop {
                // Not at once: the next workload of the volume may start, and its calls would be refused in the meantime.
                tokio::time::sleep(backoff.next_delay()).await;
                if needed.is_cancelled() || cleanups.clean_up(&volume, cleared, Some(&needed)).await {
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
        let VolumeOperations { locks, volumes, .. } = &self.operations;
        loop {
            volumes.monitor.wait_until_usable().await;
            let lock = locks.acquire(volume.clone().into(), LockMode::Change).await;
            // Neither is held while this task waits for the other: a volume that is locked for long must not keep the threads, and a
            // cleanup that waits for a thread must not have calls for its volume refused.
            let Ok(thread) = Arc::clone(&self.threads).try_acquire_owned() else {
                drop(lock);
                drop(self.threads.acquire().await);
                continue;
            };
            if repetition.is_some_and(CancellationToken::is_cancelled) {
                return true;
            }
            if volumes.monitor.current().is_err() {
                continue;
            }
            let (cleanups, id, is_repetition) = (self.clone(), volume.clone(), repetition.is_some());
            let mut cleaned = pin!(self.operations.run(move |volumes| {
                let _lock = lock;
                let cleaned = volumes.monitor.current().and_then(|publisher| {
                    publisher.clean_up(&id, &cleared).map_err(|error| storage_error_or(volumes, error))
                });
                Ok(cleanups.plan_repetition(&id, cleared, cleaned, is_repetition))
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
    pub(super) fn keep_devices(&self, volume: &VolumeId) {
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

/// Closes the devices of a volume that are mounted nowhere. While the storage is unavailable, an administrator could otherwise neither
/// detach them nor unmount the disk.
fn release_unmounted(volumes: &Volumes, volume: &VolumeId) {
    let Some(devices) = volumes.monitor.devices() else { return };
    if let Err(error) = devices.release_unmounted(volume, &volumes.root) {
        tracing::warn!(%volume, %error, "the driver keeps the loop devices of the volume open");
    }
}

/// Returns the error of the storage if it has failed, because that has probably caused `error`.
fn storage_error_or(volumes: &Volumes, error: loopfs::Error) -> Error {
    volumes.monitor.verified().err().unwrap_or_else(|| error.into())
}
