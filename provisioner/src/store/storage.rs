//! The node's volume store for the other tasks: open, or unavailable and why.
//!
//! The store may be unusable when the process starts (not mounted, another disk, no quotas) or become so later. The process keeps
//! running: it retries, records an event on the Node object that says what is wrong and what to do, and continues when the store
//! is usable.

use std::{fs::File, os::fd::AsFd, sync::Arc, time::Duration};

use loopfs::ErrorKind;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use tokio::{sync::watch, time::sleep};

use crate::{
    api::events::{Events, Reason},
    store::{
        throttle::{BackgroundThrottle, ForegroundOps},
        volumes::{StorageError, VolumeBackend, VolumeError},
    },
};

/// A function that opens the store.
pub(crate) type Opener = Arc<dyn Fn() -> Result<Arc<dyn VolumeBackend>, VolumeError> + Send + Sync>;

/// The store, which all tasks of the process share.
#[derive(Debug)]
pub(crate) struct Storage {
    state: watch::Sender<StorageState>,
    foreground: Arc<ForegroundOps>,
}

/// The state of the store.
#[derive(Debug, Clone)]
pub(crate) enum StorageState {
    /// No attempt to open it has completed yet.
    Untried,
    Unavailable(String),
    /// No file system was ever mounted at the data directory. On a node without a disk for volumes that is no error.
    Absent(String),
    Open(Arc<dyn VolumeBackend>),
}

impl StorageState {
    fn volumes(&self) -> Result<Arc<dyn VolumeBackend>, StorageError> {
        match self {
            StorageState::Open(volumes) => Ok(Arc::clone(volumes)),
            StorageState::Unavailable(why) | StorageState::Absent(why) => {
                Err(StorageError::Unavailable(why.clone()))
            }
            StorageState::Untried => Err(StorageError::Untried),
        }
    }
}

impl Default for Storage {
    fn default() -> Self {
        Storage { state: watch::Sender::new(StorageState::Untried), foreground: Arc::default() }
    }
}

impl Storage {
    /// Directs all operations to this store from now on.
    pub(crate) fn open(&self, volumes: Arc<dyn VolumeBackend>) {
        self.state.send_replace(StorageState::Open(volumes));
    }

    /// Returns `true` if this node never had storage.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(*self.state.borrow(), StorageState::Absent(_))
    }

    fn close(&self, why: VolumeError) {
        self.state.send_replace(match why.kind {
            ErrorKind::NeverMounted => StorageState::Absent(why.message),
            _ => StorageState::Unavailable(why.message),
        });
    }

    /// Checks that the store was open at the last access. For use before steps that are useless without it.
    ///
    /// # Errors
    /// [`StorageError::Unavailable`] if it was not.
    pub(crate) fn require_open(&self) -> Result<(), StorageError> {
        self.state.borrow().volumes().map(drop)
    }

    /// Returns once the store was opened or an attempt to open it failed.
    pub(crate) async fn tried(&self) {
        // An error would mean that the sender was dropped, but `self` holds it.
        drop(self.changes().wait_for(|state| !matches!(state, StorageState::Untried)).await);
    }

    /// Returns a receiver that is notified whenever the store opens or becomes unavailable.
    pub(crate) fn changes(&self) -> watch::Receiver<StorageState> {
        self.state.subscribe()
    }

    /// Runs a blocking operation on the store, off the async threads. It first verifies that the store is still the one that was
    /// opened.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub(crate) async fn run<T, F>(&self, operation: F) -> Result<T, StorageError>
    where
        T: Send + 'static,
        F: FnOnce(&dyn VolumeBackend) -> Result<T, VolumeError> + Send + 'static,
    {
        let _foreground = self.foreground.enter();
        self.run_blocking(operation).await
    }

    /// Runs background work as [`run`](Self::run) does. The operation gets a function that yields to foreground operations.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub(crate) async fn run_yielding<T, F>(&self, operation: F) -> Result<T, StorageError>
    where
        T: Send + 'static,
        F: FnOnce(&dyn VolumeBackend, &mut dyn FnMut()) -> Result<T, VolumeError> + Send + 'static,
    {
        let mut throttle = BackgroundThrottle::new(Arc::clone(&self.foreground));
        self.run_blocking(move |volumes| operation(volumes, &mut || throttle.yield_now())).await
    }

    async fn run_blocking<T, F>(&self, operation: F) -> Result<T, StorageError>
    where
        T: Send + 'static,
        F: FnOnce(&dyn VolumeBackend) -> Result<T, VolumeError> + Send + 'static,
    {
        let volumes = self.state.borrow().volumes()?;
        let checked = move || volumes.verify().and_then(|()| operation(&*volumes));
        match tokio::task::spawn_blocking(checked).await {
            Ok(Err(error)) if error.concerns_the_store() => {
                self.close(error.clone());
                Err(StorageError::Unavailable(error.message))
            }
            Ok(result) => Ok(result?),
            Err(panicked) => {
                tracing::error!(error = %panicked, "an operation on the volume store panicked");
                Err(StorageError::Panicked)
            }
        }
    }
}

/// Wait before the first retry of opening the store. Each further wait is twice as long, up to [`RETRY_LONGEST`].
const RETRY_FIRST: Duration = Duration::from_secs(1);
/// Longest wait before a retry of opening the store. A change of the mount table ends the wait.
const RETRY_LONGEST: Duration = Duration::from_secs(60);
/// Interval at which an open store is verified, in addition to the check before every operation.
const VERIFY_INTERVAL: Duration = Duration::from_secs(60);

/// Opens the store, verifies it and opens it again until shutdown. Calls `opened` each time the store becomes usable.
pub(crate) async fn keep_open(storage: &Storage, open: Opener, events: &Events, opened: impl Fn()) {
    let mounts = MountTable::open();
    let mut retry = RETRY_FIRST;
    let mut failed_before = false;
    loop {
        let attempt = Arc::clone(&open);
        let result = tokio::task::spawn_blocking(move || {
            let volumes = attempt()?;
            let recovered = volumes.recover()?;
            Ok::<_, VolumeError>((volumes, recovered))
        });
        match result.await {
            Ok(Ok((volumes, recovered))) => {
                let filesystem = volumes.filesystem_uuid();
                tracing::info!(%filesystem, recovered, "the volume store is open");
                if failed_before {
                    let note = format!("the volume store on file system {filesystem} is in use again");
                    events.publish_on_node(Reason::StorageReady, note);
                }
                (failed_before, retry) = (false, RETRY_FIRST);
                storage.open(volumes);
                opened();
                until_lost(storage, &mounts).await;
            }
            Ok(Err(error)) => storage.close(error),
            Err(panicked) => {
                tracing::error!(error = %panicked, "opening the volume store panicked");
                storage.state.send_replace(StorageState::Unavailable(StorageError::Panicked.to_string()));
            }
        }
        if let StorageState::Unavailable(why) | StorageState::Absent(why) = storage.state.borrow().clone() {
            failed_before = true;
            events.publish_on_node(Reason::StorageUnavailable, why);
        }
        mounts.changed_within(retry).await;
        retry = (retry * 2).min(RETRY_LONGEST);
    }
}

/// Returns once the open store is unavailable.
async fn until_lost(storage: &Storage, mounts: &MountTable) {
    let mut state = storage.state.subscribe();
    loop {
        tokio::select! {
            lost = state.wait_for(|state| !matches!(state, StorageState::Open(_))) => {
                // An error would mean that the sender was dropped, but `storage` holds it.
                return drop(lost);
            }
            () = mounts.changed_within(VERIFY_INTERVAL) => {}
        }
        if let Err(error) = storage.run(|_volumes| Ok(())).await {
            tracing::debug!(%error, "the volume store was verified");
        }
    }
}

/// The mount table of this mount namespace, which can be polled for changes (proc(5)).
struct MountTable {
    mountinfo: Option<Arc<File>>,
}

impl MountTable {
    fn open() -> Self {
        let mountinfo = File::open("/proc/self/mountinfo").inspect_err(|error| {
            tracing::warn!(%error, "cannot watch /proc/self/mountinfo; a repaired mount is noticed at the next retry instead");
        });
        MountTable { mountinfo: mountinfo.ok().map(Arc::new) }
    }

    /// Returns at the next change, or when the time has passed.
    async fn changed_within(&self, time: Duration) {
        let Some(mountinfo) = self.mountinfo.clone() else { return sleep(time).await };
        // A thread waits. It ends with this future, which closes its end of the pipe when it is dropped.
        let Ok((ended, _end)) = std::io::pipe() else { return sleep(time).await };
        let polled = tokio::task::spawn_blocking(move || {
            let mut awaited = [
                PollFd::new(mountinfo.as_fd(), PollFlags::POLLPRI),
                PollFd::new(ended.as_fd(), PollFlags::POLLIN),
            ];
            poll(&mut awaited, PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX))
        });
        match polled.await {
            Ok(Ok(_) | Err(Errno::EINTR)) => {}
            failed => {
                tracing::warn!(?failed, "cannot watch /proc/self/mountinfo");
                sleep(time).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use loopfs::{Bytes, ErrorKind};
    use tokio::{sync::mpsc, time::timeout};

    use super::*;
    use crate::testing::{
        fake_store::{self, FakeStore},
        fixtures,
    };

    async fn next(event_requests: &mut mpsc::Receiver<crate::api::events::EventRequest>) -> &'static str {
        let request = timeout(Duration::from_secs(60), event_requests.recv()).await;
        request.expect("an event in time").expect("the recorder exists").reason().as_str()
    }

    #[tokio::test]
    async fn a_store_is_opened_when_usable_and_again_after_it_was_unavailable() {
        let volumes = Arc::new(FakeStore::of_size(Bytes(1 << 30)));
        volumes.state().broken = Some(fake_store::error(ErrorKind::NotMounted, "mount it"));
        let model = Arc::clone(&volumes);
        let open: Opener = Arc::new(move || {
            model.verify()?;
            Ok(Arc::clone(&model) as Arc<dyn VolumeBackend>)
        });
        let (storage, (events, mut event_requests)) = (Arc::new(Storage::default()), Events::new("node-a"));
        let (task_storage, openings) = (Arc::clone(&storage), Arc::new(Mutex::new(0)));
        let counter = Arc::clone(&openings);
        let task = tokio::spawn(async move {
            let opened = || *counter.lock().unwrap() += 1;
            keep_open(&task_storage, open, &events, opened).await;
        });

        assert_eq!(next(&mut event_requests).await, "StorageUnavailable");
        let refused = storage.run(|_volumes| Ok(())).await;
        assert_eq!(refused, Err(StorageError::Unavailable("mount it".to_owned())));

        volumes.state().broken = None;
        assert_eq!(next(&mut event_requests).await, "StorageReady");
        assert_eq!(
            storage.run(|volumes| Ok(volumes.filesystem_uuid())).await,
            Ok(fixtures::FILESYSTEM.to_owned())
        );

        volumes.state().broken = Some(fake_store::error(ErrorKind::NotEnforced, "remount it"));
        let lost = storage.run(|_volumes| -> Result<(), _> { unreachable!("verified first") }).await;
        assert_eq!(lost, Err(StorageError::Unavailable("remount it".to_owned())));
        assert_eq!(next(&mut event_requests).await, "StorageUnavailable");

        volumes.state().broken = None;
        assert_eq!(next(&mut event_requests).await, "StorageReady");
        assert_eq!(*openings.lock().unwrap(), 2);
        task.abort();
    }

    #[tokio::test]
    async fn an_error_of_one_volume_leaves_the_store_open() {
        let storage = Storage::default();
        storage.open(Arc::new(FakeStore::of_size(Bytes(0))));
        let full = fake_store::error(ErrorKind::NoSpace, "full");
        let refusal = full.clone();
        assert_eq!(storage.run(move |_volumes| -> Result<(), _> { Err(refusal) }).await, Err(full.into()));
        assert_eq!(storage.run(|_volumes| Ok(())).await, Ok(()));
    }

    #[tokio::test]
    async fn a_panic_in_the_store_is_an_error() {
        let storage = Storage::default();
        storage.open(Arc::new(FakeStore::of_size(Bytes(0))));
        let result = storage.run(|_volumes| -> Result<(), _> { panic!("on purpose") }).await;
        assert_eq!(result, Err(StorageError::Panicked));
    }
}
