//! The node's volume store as the rest of the process sees it: open, or not and why.
//!
//! The store may be unusable when the process starts (not mounted, another disk, no quotas) or become so later. Neither
//! ends the process: it keeps trying, says on the Node object what is wrong and what to do, and carries on once it is right.

use std::{fs::File, os::fd::AsFd, sync::Arc, time::Duration};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use tokio::{sync::watch, time::sleep};

use crate::{
    events::{Events, Reason},
    identity::Identity,
    volumes::{VolumeError, Volumes},
};

/// Why an operation on volumes failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StorageError {
    /// The store is not open.
    #[error("the storage of this node is not usable now: {0}")]
    Unavailable(String),
    /// The store refused.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// A bug: the operation panicked. The store's own recovery takes care of what it left behind.
    #[error("internal error in the volume store, see the provisioner's log")]
    Panicked,
}

/// The store, shared by everything in the process.
#[derive(Debug)]
pub(crate) struct Storage {
    state: watch::Sender<State>,
}

#[derive(Debug, Clone)]
enum State {
    Unavailable(String),
    Open(Arc<dyn Volumes>),
}

impl Default for Storage {
    fn default() -> Self {
        Storage { state: watch::Sender::new(State::Unavailable("it has not been opened yet".to_owned())) }
    }
}

impl Storage {
    /// From now on operations go to this store.
    pub(crate) fn open(&self, volumes: Arc<dyn Volumes>) {
        self.state.send_replace(State::Open(volumes));
    }

    fn close(&self, why: impl Into<String>) {
        self.state.send_replace(State::Unavailable(why.into()));
    }

    /// Runs a blocking operation on the store, off the async threads, after checking that the store still is what it was
    /// opened as.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub(crate) async fn run<T, F>(&self, operation: F) -> Result<T, StorageError>
    where
        T: Send + 'static,
        F: FnOnce(&dyn Volumes) -> Result<T, VolumeError> + Send + 'static,
    {
        let state = self.state.borrow().clone();
        let volumes = match state {
            State::Open(volumes) => volumes,
            State::Unavailable(why) => return Err(StorageError::Unavailable(why)),
        };
        let checked = move || volumes.verify().and_then(|()| operation(&*volumes));
        match tokio::task::spawn_blocking(checked).await {
            Ok(Err(error)) if error.concerns_the_store() => {
                self.close(error.message.as_str());
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

/// The first retry of opening the store comes after this, and each further one after twice as long,
const RETRY_FIRST: Duration = Duration::from_secs(1);
/// but never longer than this. A change of the mount table cuts the wait short.
const RETRY_LONGEST: Duration = Duration::from_secs(60);
/// An open store is looked at this often, besides before every operation.
const VERIFY_EVERY: Duration = Duration::from_secs(60);

/// Opens the store, watches over it and opens it again, for ever. `opened` is called each time it becomes usable.
pub(crate) async fn keep_open<O>(
    storage: &Storage,
    open: O,
    events: &Events,
    identity: &Identity,
    opened: impl Fn(),
) where
    O: Fn() -> Result<Arc<dyn Volumes>, VolumeError> + Clone + Send + 'static,
{
    let mounts = MountTable::open();
    let mut retry = RETRY_FIRST;
    let mut ailing = false;
    loop {
        let attempt = open.clone();
        let result = tokio::task::spawn_blocking(move || {
            let volumes = attempt()?;
            let recovered = volumes.recover()?;
            Ok::<_, VolumeError>((volumes, recovered))
        });
        match result.await {
            Ok(Ok((volumes, recovered))) => {
                let filesystem = volumes.filesystem_uuid();
                tracing::info!(%filesystem, recovered, "the volume store is open");
                if ailing {
                    let note = format!("the volume store on file system {filesystem} is in use again");
                    events.publish_on_node(identity, Reason::StorageReady, note);
                }
                (ailing, retry) = (false, RETRY_FIRST);
                storage.open(volumes);
                opened();
                until_lost(storage, &mounts).await;
            }
            Ok(Err(error)) => {
                storage.close(error.message);
            }
            Err(panicked) => {
                tracing::error!(error = %panicked, "opening the volume store panicked");
                storage.close(StorageError::Panicked.to_string());
            }
        }
        if let State::Unavailable(why) = storage.state.borrow().clone() {
            ailing = true;
            events.publish_on_node(identity, Reason::StorageUnavailable, why);
        }
        mounts.changed_within(retry).await;
        retry = (retry * 2).min(RETRY_LONGEST);
    }
}

/// Returns once the open store is not usable any more.
async fn until_lost(storage: &Storage, mounts: &MountTable) {
    let mut state = storage.state.subscribe();
    loop {
        tokio::select! {
            lost = state.wait_for(|state| matches!(state, State::Unavailable(_))) => {
                // An error would mean that the sender is gone, and `storage` holds it.
                return drop(lost);
            }
            () = mounts.changed_within(VERIFY_EVERY) => {}
        }
        if let Err(error) = storage.run(|_volumes| Ok(())).await {
            tracing::debug!(%error, "the volume store was verified");
        }
    }
}

/// The kernel's mount table of this mount namespace, which can be polled for changes (proc(5)).
struct MountTable {
    mountinfo: Option<Arc<File>>,
}

impl MountTable {
    fn open() -> Self {
        let mountinfo = File::open("/proc/self/mountinfo").inspect_err(|error| {
            tracing::warn!(%error, "cannot watch /proc/self/mountinfo; a mended mount is noticed at the next retry instead");
        });
        MountTable { mountinfo: mountinfo.ok().map(Arc::new) }
    }

    /// Returns at the next change, or when the time is up.
    async fn changed_within(&self, time: Duration) {
        let Some(mountinfo) = self.mountinfo.clone() else { return sleep(time).await };
        // The whole wait on a thread of its own: a change is reported once, to whoever polls.
        let polled = tokio::task::spawn_blocking(move || {
            let mut changes = [PollFd::new(mountinfo.as_fd(), PollFlags::POLLPRI)];
            poll(&mut changes, PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX))
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
