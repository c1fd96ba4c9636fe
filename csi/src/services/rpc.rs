//! How a call runs: its log line, its work on a blocking thread under the locks of its objects, and the gRPC code of its error.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use csi_wire::reason::Reason;
use loopfs::ErrorKind;
use loopfs::publish::PublishRoot;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Response, Status};
use tracing::Instrument;

use crate::background::{ForegroundCalls, TrashCleanup};
use crate::blocking;
use crate::changes::Changes;
use crate::error::{Error, Result};
use crate::locks::{LockMode, OperationObject, VolumeLocks};
use crate::storage::StorageMonitor;

/// The number of the next call. The log contains it, so that the lines of concurrent calls can be told apart.
static CALLS: AtomicU64 = AtomicU64::new(1);

/// The maximum length of a volume id in the log. Clients choose the ids, so control characters are escaped too.
const MAX_LOGGED_CHARS: usize = 128;

/// The maximum number of threads in calls that access the disk. The runtime has 512 threads; the others serve calls
/// that do not access the disk.
const DISK_THREADS: usize = 256;

/// The maximum length of a message in bytes. A status is sent in HTTP/2 headers, whose size clients limit. Longer
/// messages are truncated.
const MAX_MESSAGE_LEN: usize = 2048;

/// Decides at which level the success of a call is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RpcKind {
    /// The RPC changes state. Its success is logged by default.
    Mutating,
    /// The RPC changes nothing, or is called repeatedly and changes something once.
    Quiet,
}

/// Runs one call, logs its result, and converts its error to a status.
pub(super) async fn traced<T>(
    rpc: &'static str,
    kind: RpcKind,
    volume: &str,
    call: impl Future<Output = Result<T>>,
) -> Result<Response<T>, Status> {
    // Spans of this level are always enabled, so each line about a call identifies the call.
    let span = tracing::error_span!(
        "rpc",
        rpc,
        request = CALLS.fetch_add(1, Ordering::Relaxed),
        volume = (!volume.is_empty()).then(|| tracing::field::debug(Escaped(volume))),
    );
    async {
        let start = Instant::now();
        let result = call.await.map(Response::new).map_err(Status::from);
        let took = format_args!("{:.1?}", start.elapsed());
        match &result {
            Ok(_) if kind == RpcKind::Mutating => tracing::info!(%took, "the call succeeded"),
            Ok(_) => tracing::debug!(%took, "the call succeeded"),
            Err(status) => {
                // The error may quote the request, so only what fits into the status is logged.
                let error = status.message();
                match status.code() {
                    // The driver or the machine caused the error, not the client.
                    Code::Internal => tracing::error!(%took, %error, "the call failed"),
                    code => tracing::warn!(%took, ?code, %error, "the call was refused"),
                }
            }
        }
        result
    }
    .instrument(span)
    .await
}

struct Escaped<'a>(&'a str);

impl fmt::Debug for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text) = self;
        text.chars()
            .take(MAX_LOGGED_CHARS)
            .try_for_each(|character| write!(f, "{}", character.escape_debug()))?;
        f.write_str(if text.chars().nth(MAX_LOGGED_CHARS).is_some() { "…" } else { "" })
    }
}

/// Returns `None` if the store has no such volume or snapshot.
pub(super) fn found<T>(result: loopfs::Result<T>) -> Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Converts to the signed integers of the CSI messages.
pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The volumes of this node. The work of a call reads their current state from the store, the mount table and the loop devices. It
/// therefore works alike after a restart of the driver, and if a volume was staged without the driver's knowledge.
#[derive(Debug)]
pub(crate) struct Volumes {
    pub(crate) monitor: Arc<StorageMonitor>,
    pub(crate) root: Arc<PublishRoot>,
    pub(crate) trash_cleanup: Arc<TrashCleanup>,
    pub(crate) changes: Arc<Changes>,
}

/// The volumes, and the locks of the operations that are in progress on them. Work other than a copy, and a deletion by
/// `loopfs.v1.Volumes` that has not begun, continues after its client has disconnected. All work keeps its locks until it ends.
#[derive(Clone, Debug)]
pub(crate) struct VolumeOperations {
    pub(super) volumes: Arc<Volumes>,
    pub(super) locks: VolumeLocks,
    foreground: Arc<ForegroundCalls>,
    /// Limits the threads of some callers among those of all.
    own_threads: Option<Arc<Semaphore>>,
    disk_threads: Arc<Semaphore>,
    stop: CancellationToken,
}

impl VolumeOperations {
    pub(crate) fn new(volumes: Volumes, foreground: Arc<ForegroundCalls>, stop: CancellationToken) -> Self {
        Self {
            volumes: Arc::new(volumes),
            locks: VolumeLocks::default(),
            foreground,
            own_threads: None,
            disk_threads: Arc::new(Semaphore::new(DISK_THREADS)),
            stop,
        }
    }

    /// Returns `true` if no call is doing its work.
    pub(crate) fn is_idle(&self) -> bool {
        self.foreground.is_idle()
    }

    /// Returns the same operations for callers of which at most this many access the disk at the same time.
    pub(crate) fn limited(&self, threads: usize) -> Self {
        Self { own_threads: Some(Arc::new(Semaphore::new(threads))), ..self.clone() }
    }

    /// Runs work under these locks.
    pub(super) async fn locked<T: Send + 'static>(
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

    /// Runs work under these locks. Returns an error as soon as the disk hangs; the work goes on.
    pub(super) async fn locked_unless_hanging<T: Send + 'static>(
        &self,
        wanted: impl IntoIterator<Item = (OperationObject, LockMode)>,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        tokio::select! {
            outcome = self.locked(wanted, work) => outcome,
            error = self.volumes.monitor.wait_until_hanging() => Err(error),
        }
    }

    /// Runs the copy of a volume or snapshot under these locks. Its second argument returns `false` once the client has ended the call or the
    /// driver stops.
    pub(super) async fn copying<T: Send + 'static>(
        &self,
        wanted: impl IntoIterator<Item = (OperationObject, LockMode)>,
        work: impl FnOnce(&Volumes, &dyn Fn() -> bool) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (call, stop) = (WhileCalled::default(), self.stop.clone());
        let is_called = call.is_called();
        // The next driver would throw the copy away.
        let is_wanted = move || is_called() && !stop.is_cancelled();
        // The error is not final, because the next driver can create the copy.
        let ended = || Error::Temporary("the copy has ended, because the driver stops".to_owned());
        self.locked(wanted, move |volumes| {
            if !is_wanted() {
                return Err(ended());
            }
            work(volumes, &is_wanted).map_err(|error| {
                // What was copied by then is in the trash.
                volumes.trash_cleanup.request();
                if is_wanted() { error } else { ended() }
            })
        })
        .await
    }

    /// Runs work that changes nothing, without locks. Returns an error as soon as the disk hangs.
    pub(crate) async fn unlocked<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if self.volumes.monitor.hang_error().is_some() {
            // The work detects the failure too, and returns the information that is available without the disk.
            return self.run(work).await;
        }
        self.locked_unless_hanging([], work).await
    }

    pub(super) async fn run<T: Send + 'static>(
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
}

/// Dropped with the call. The work of the call asks whether the client still waits for it.
#[derive(Default)]
pub(super) struct WhileCalled(Arc<()>);

impl WhileCalled {
    pub(super) fn is_called(&self) -> impl Fn() -> bool + use<> {
        let called = Arc::downgrade(&self.0);
        move || called.strong_count() > 0
    }
}

impl Error {
    /// Returns the gRPC code. It determines whether an orchestrator retries, gives up, or permits the user to reduce a
    /// requested size again.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Invalid(_) | Self::WrongAccessType(_) | Self::UnsuitableSource(_) => Code::InvalidArgument,
            Self::OperationPending(_) | Self::Temporary(_) | Self::StaleToken(_) => Code::Aborted,
            Self::StorageUnavailable(_)
            | Self::StorageStarting
            | Self::Precondition(_)
            | Self::OtherFilesystem { .. } => Code::FailedPrecondition,
            Self::Storage(error) => code_of(error.kind()),
            Self::Incompatible(_) => Code::AlreadyExists,
            // Only requests to create a volume or snapshot return this error. The orchestrator then tries another node.
            Self::NotOnThisNode(_) => Code::ResourceExhausted,
            Self::NotPublished(_)
            | Self::NoSuchVolume(_)
            | Self::NoSuchSnapshot(_)
            | Self::SourceNotFound(_) => Code::NotFound,
            Self::OutOfRange(_) => Code::OutOfRange,
            Self::File { .. } | Self::Defect(_) => Code::Internal,
        }
    }

    /// Returns the reason for a client that knows more than the gRPC codes.
    fn reason(&self) -> Reason {
        match self {
            // A restart is no outage.
            Self::OperationPending(_) | Self::Temporary(_) | Self::StorageStarting => Reason::Pending,
            Self::StorageUnavailable(_) => Reason::Unavailable,
            Self::OtherFilesystem { present, .. } => Reason::OtherFilesystem(*present),
            Self::Defect(_) => Reason::Defect,
            Self::Storage(error) => Reason::Store(error.kind()),
            Self::Invalid(_) => Reason::Store(ErrorKind::InvalidInput),
            Self::NoSuchVolume(_) | Self::NoSuchSnapshot(_) | Self::SourceNotFound(_) => {
                Reason::Store(ErrorKind::NotFound)
            }
            _ => Reason::Store(ErrorKind::Other),
        }
    }
}

fn code_of(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::AlreadyExists => Code::AlreadyExists,
        ErrorKind::InvalidInput => Code::InvalidArgument,
        // This is never ResourceExhausted: external-resizer treats that code as an expansion that may still be running,
        // and the user could then not request less. Requests to create a volume return Error::NotOnThisNode instead.
        ErrorKind::NoSpace | ErrorKind::WouldShrink => Code::OutOfRange,
        ErrorKind::Busy => Code::Aborted,
        ErrorKind::NotEnforced
        | ErrorKind::NotMounted
        | ErrorKind::NeverMounted
        | ErrorKind::WrongFilesystem
        | ErrorKind::ReadOnly
        | ErrorKind::Conflict
        | ErrorKind::ShutDown
        | ErrorKind::Damaged
        | ErrorKind::NotHonoured
        | ErrorKind::Unsupported => Code::FailedPrecondition,
        // The driver lacks a Linux capability. Its deployment causes that, not the client.
        ErrorKind::PermissionDenied | ErrorKind::Other => Code::Internal,
        _ => Code::Internal,
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let (code, reason) = (error.code(), error.reason());
        let mut message = error.to_string();
        if message.len() > MAX_MESSAGE_LEN {
            let fits = |end: &usize| message.is_char_boundary(*end);
            message.truncate((0..=MAX_MESSAGE_LEN).rev().find(fits).unwrap_or(0));
            message.push('…');
        }
        let mut status = Self::new(code, message);
        reason.add_to(&mut status);
        status
    }
}

#[cfg(test)]
mod tests {
    use tracing::instrument::WithSubscriber;

    use super::*;

    /// It cannot flood the log either: a long id is shortened.
    #[test]
    fn volume_id_cannot_forge_log_lines() {
        assert_eq!(format!("{:?}", Escaped("pvc-1")), "pvc-1");
        assert_eq!(format!("{:?}", Escaped("a\nERROR")), "a\\nERROR");
        assert_eq!(format!("{:?}", Escaped(&"v".repeat(4096))).chars().count(), MAX_LOGGED_CHARS + 1);
    }

    #[test]
    fn restarting_driver_is_not_unavailable() {
        let reason = |error| Reason::of(&Status::from(error));
        assert_eq!(reason(Error::StorageStarting), Some(Reason::Pending));
        assert_eq!(reason(Error::StorageUnavailable("mount it".to_owned())), Some(Reason::Unavailable));
    }

    /// In the log, too.
    #[tokio::test]
    async fn long_status_messages_are_truncated() {
        let log = tempfile::tempfile().unwrap();
        let writer = Arc::new(log.try_clone().unwrap());
        let subscriber = tracing_subscriber::fmt().with_writer(writer).finish();
        let call = async { Err::<(), _>(Error::Precondition("ü".repeat(MAX_MESSAGE_LEN))) };
        let call = traced("Create", RpcKind::Mutating, "v", call).with_subscriber(subscriber);
        let status = call.await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().len() <= MAX_MESSAGE_LEN + '…'.len_utf8());
        let logged = log.metadata().unwrap().len() as usize;
        assert!(MAX_MESSAGE_LEN < logged && logged < 3 * MAX_MESSAGE_LEN / 2, "{logged} bytes");
        assert_eq!(Status::from(Error::NotPublished("not there".to_owned())).message(), "not there");
    }
}
