//! How both services work on volumes and snapshots: off the event loop, and one change of each at a time.
//!
//! A data disk that hang holds the thread of each call that touches it, and the lock of its volume. Unpublishing must
//! succeed all the same, for a pod could not end otherwise: it takes no lock that such a call can hold but that of
//! its target path, and leaves what needs the disk to a task of its own.

use std::sync::Arc;

use loopfs::VolumeId;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tracing::Instrument;

use super::publish::{Cleared, Volumes};
use super::volume_locks::{LockMode, VolumeLocks};
use crate::blocking;
use crate::error::{Error, Result};
use crate::object::Object;
use crate::request::{Publish, TargetPath, Unpublish};
use crate::storage::StorageMonitor;

/// Threads that may be in calls that touch the disk. The runtime has 512: the others are left to calls that do not.
const DISK_THREADS: usize = 256;

/// Of those, how many may be in what unpublications leave to do.
const CLEANUP_THREADS: usize = 16;

/// The volumes, and what is being done to which of them by whichever service.
#[derive(Clone, Debug)]
pub(crate) struct VolumeOperations {
    locks: VolumeLocks,
    volumes: Arc<Volumes>,
    monitor: Arc<StorageMonitor>,
    disk_threads: Arc<Semaphore>,
    cleanup_threads: Arc<Semaphore>,
}

impl VolumeOperations {
    pub(crate) fn new(volumes: Volumes, monitor: Arc<StorageMonitor>) -> Self {
        Self {
            locks: VolumeLocks::default(),
            volumes: Arc::new(volumes),
            monitor,
            disk_threads: Arc::new(Semaphore::new(DISK_THREADS)),
            cleanup_threads: Arc::new(Semaphore::new(CLEANUP_THREADS)),
        }
    }

    /// Runs work that changes something about a volume, while nothing else does.
    pub(crate) async fn exclusive<T: Send + 'static>(
        &self,
        volume: &VolumeId,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.locked([(volume.clone().into(), LockMode::Change)], work).await
    }

    /// Runs work while nothing hinders it.
    pub(crate) async fn locked<T: Send + 'static>(
        &self,
        wanted: impl IntoIterator<Item = (Object, LockMode)>,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let lock = self.locks.try_acquire(wanted)?;
        self.run(move |volumes| {
            let _lock = lock;
            work(volumes)
        })
        .await
    }

    /// Runs work that changes nothing. If the disk begins to hang, this does not wait for it.
    pub(crate) async fn unlocked<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if self.monitor.hang().is_some() {
            // The work finds that out too, and does what is possible without the disk.
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
        // An error would mean that the semaphore is closed, which it never is.
        let thread = Arc::clone(&self.disk_threads).acquire_owned().await;
        let volumes = Arc::clone(&self.volumes);
        blocking::run(move || {
            let _thread = thread;
            work(&volumes)
        })
        .await
    }

    pub(crate) async fn publish(&self, publish: Publish) -> Result<()> {
        let wanted =
            [(publish.volume.clone().into(), LockMode::Change), (target(&publish.target), LockMode::Change)];
        self.locked(wanted, move |volumes| volumes.publish(&publish)).await
    }

    /// Takes the volume away from its target, and then does what else is to be done if it is published nowhere now. If the
    /// disk hang, that is done when it goes on, and this does not wait for it.
    pub(crate) async fn unpublish(&self, unpublish: Unpublish) -> Result<()> {
        let work = self.clone();
        // A task of its own, for the call may be cancelled between the two.
        let clearing = tokio::spawn(async move { work.clear(unpublish).await }.in_current_span());
        let cleanup = clearing
            .await
            .unwrap_or_else(|panic| Err(Error::Defect(format!("a defect of the driver: {panic}"))))?;
        tokio::select! {
            _ended = cleanup => {}
            error = self.monitor.wait_until_hanging() => {
                tracing::warn!(%error, "the target is cleared; its volume is cleaned up when the data disk takes writes again");
            }
        }
        Ok(())
    }

    /// Clears the target, and begins the cleanup of the volume.
    async fn clear(self, unpublish: Unpublish) -> Result<JoinHandle<()>> {
        let lock = self.locks.try_acquire([(target(&unpublish.target), LockMode::Change)])?;
        let volumes = Arc::clone(&self.volumes);
        let volume = unpublish.volume.clone();
        let cleared = blocking::run(move || {
            let _lock = lock;
            volumes.clear_target(&unpublish.target)
        });
        let cleared = cleared.await?;
        Ok(tokio::spawn(async move { self.clean_up(volume, cleared).await }.in_current_span()))
    }

    async fn clean_up(self, volume: VolumeId, cleared: Cleared) {
        let lock = self.locks.acquire(volume.clone().into(), LockMode::Change).await;
        let thread = Arc::clone(&self.cleanup_threads).acquire_owned().await;
        let cleaned = self.run(move |volumes| {
            let _held = (lock, thread);
            volumes.clean_up(&volume, &cleared)
        });
        if let Err(error) = cleaned.await {
            tracing::warn!(%error, "the target is cleared; the cleanup of its volume is left to NodeUnstageVolume");
        }
    }
}

fn target(path: &TargetPath) -> Object {
    Object::Target(path.relative().to_owned())
}
