//! The result of a check, shared by all requests for it.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// The latest result of a check.
///
/// Requests do not run the check themselves: one task runs it, and every request that arrives in the meantime waits for
/// that task. A client that sends many requests therefore causes no more checks than one that sends few, and a check that
/// hangs holds one task (and its threads), however many requests wait for its result.
#[derive(Debug)]
pub(crate) struct LatestResult<T> {
    max_age: Duration,
    max_wait: Duration,
    last: Mutex<Option<Run<T>>>,
}

/// One run of the check.
#[derive(Clone, Debug)]
struct Run<T> {
    started: Instant,
    /// The result and the time the check ended. Closed without a result if the check panicked.
    result: watch::Receiver<Option<(Instant, T)>>,
}

/// The reason why a check has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// It has been running for this long.
    Running(Duration),
    Panicked,
}

impl<T: Clone + Send + Sync + 'static> LatestResult<T> {
    /// Creates a check without a result. A result is returned for `max_age` after its check ended, and a request waits
    /// for a running check for at most `max_wait`.
    pub(crate) fn new(max_age: Duration, max_wait: Duration) -> Self {
        Self { max_age, max_wait, last: Mutex::default() }
    }

    /// Returns the latest result. Runs `check` if that result is too old and no check is running.
    ///
    /// # Errors
    /// The running check has not ended within `max_wait`, or it panicked.
    pub(crate) async fn get<F>(&self, check: impl FnOnce() -> F) -> Result<T, NoResult>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut run = self.current_run(check);
        let ended = timeout(self.max_wait, run.result.wait_for(Option::is_some)).await;
        match ended {
            Ok(Ok(result)) => result.as_ref().map(|(_, result)| result.clone()).ok_or(NoResult::Panicked),
            Ok(Err(_closed)) => Err(NoResult::Panicked),
            Err(_elapsed) => Err(NoResult::Running(run.started.elapsed())),
        }
    }

    fn current_run<F>(&self, check: impl FnOnce() -> F) -> Run<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut last = self.lock();
        match &*last {
            Some(run) if run.is_current(self.max_age) => run.clone(),
            _ => last.insert(Run::start(check())).clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Run<T>>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + Sync + 'static> Run<T> {
    fn start(check: impl Future<Output = T> + Send + 'static) -> Self {
        let (sender, result) = watch::channel(None);
        tokio::spawn(async move { sender.send_replace(Some((Instant::now(), check.await))) });
        Self { started: Instant::now(), result }
    }

    /// Returns `true` if the check is running, or if it ended at most `max_age` ago.
    fn is_current(&self, max_age: Duration) -> bool {
        match &*self.result.borrow() {
            Some((ended, _)) => ended.elapsed() < max_age,
            None => self.result.has_changed().is_ok(),
        }
    }
}

impl fmt::Display for NoResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running(time) => write!(f, "the check has been running for {time:.0?} and has not ended"),
            Self::Panicked => f.write_str("the check panicked; see the program's log"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::sync::Notify;

    use super::*;

    const AGE: Duration = Duration::from_secs(2);
    const WAIT: Duration = Duration::from_secs(8);

    #[tokio::test(start_paused = true)]
    async fn result_is_reused_until_too_old() {
        let (latest, checks) = (LatestResult::new(AGE, WAIT), AtomicU64::new(0));
        let check = || std::future::ready(checks.fetch_add(1, Ordering::Relaxed));
        for _ in 0..100 {
            assert_eq!(latest.get(check).await, Ok(0));
        }
        tokio::time::advance(AGE).await;
        assert_eq!(latest.get(check).await, Ok(1));
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_check_is_not_started_again() {
        let (latest, checks, released) =
            (LatestResult::new(AGE, WAIT), AtomicU64::new(0), Arc::new(Notify::new()));
        let check = || {
            checks.fetch_add(1, Ordering::Relaxed);
            let released = Arc::clone(&released);
            async move { released.notified().await }
        };
        for attempt in 1..=3 {
            assert_eq!(latest.get(check).await, Err(NoResult::Running(WAIT * attempt)));
        }
        let (result, ()) = tokio::join!(latest.get(check), async { released.notify_one() });
        assert_eq!((result, checks.load(Ordering::Relaxed)), (Ok(()), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn panicked_check_is_started_again() {
        let latest = LatestResult::new(AGE, WAIT);
        assert_eq!(latest.get(|| async { panic!("on purpose") }).await, Err::<u8, _>(NoResult::Panicked));
        assert_eq!(latest.get(|| async { 7 }).await, Ok(7));
    }
}
