//! Work that nobody waits for gives way to what somebody waits for.
//!
//! Both take the same processors, and the same log of the file system: a claim that is provisioned while a million files
//! are removed would wait for many of them. So the removal rests while an operation is under way. Only for a moment at a
//! time, for it shall come to its end on a node that is never idle as well.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Worked between two looks at the foreground. Short beside what an operation takes.
const WORK_SLICE: Duration = Duration::from_millis(10);
/// Waited at most, however much foreground there is.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// The operations that are under way.
#[derive(Debug, Default)]
pub(crate) struct ForegroundOps {
    in_progress: Mutex<usize>,
    ended: Condvar,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct ForegroundGuard<'a>(&'a ForegroundOps);

impl ForegroundOps {
    pub(crate) fn enter(&self) -> ForegroundGuard<'_> {
        *self.lock() += 1;
        ForegroundGuard(self)
    }

    /// Returns once nothing is under way, or the time is up.
    fn wait_until_idle(&self, timeout: Duration) {
        let waited = self.ended.wait_timeout_while(self.lock(), timeout, |in_progress| *in_progress > 0);
        drop(waited);
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        // Every critical section is a single step, so a panicked holder leaves it whole.
        self.in_progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ForegroundGuard<'_> {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.ended.notify_all();
    }
}

/// What makes work give way.
#[derive(Debug)]
pub(crate) struct BackgroundThrottle {
    foreground: Arc<ForegroundOps>,
    resumed_at: Instant,
}

impl BackgroundThrottle {
    pub(crate) fn new(foreground: Arc<ForegroundOps>) -> Self {
        BackgroundThrottle { foreground, resumed_at: Instant::now() }
    }

    /// Blocks where it is time to. To be called between two steps of the work.
    pub(crate) fn yield_now(&mut self) {
        if self.resumed_at.elapsed() >= WORK_SLICE {
            self.foreground.wait_until_idle(MAX_PAUSE);
            self.resumed_at = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const EVER: Duration = Duration::from_secs(3600);

    #[test]
    fn nobody_waits_where_nothing_is_under_way() {
        let foreground = ForegroundOps::default();
        foreground.wait_until_idle(EVER);
        drop((foreground.enter(), foreground.enter()));
        foreground.wait_until_idle(EVER);
    }

    #[test]
    fn the_last_to_end_lets_the_work_go_on() {
        let foreground = ForegroundOps::default();
        let guards = [foreground.enter(), foreground.enter()];
        thread::scope(|scope| {
            let waiting = scope.spawn(|| foreground.wait_until_idle(EVER));
            let [first, last] = guards;
            drop(first);
            assert!(!waiting.is_finished());
            drop(last);
            waiting.join().unwrap();
        });
    }

    #[test]
    fn traffic_without_end_holds_nobody_up_for_ever() {
        let foreground = Arc::new(ForegroundOps::default());
        let _guard = foreground.enter();
        let mut throttle = BackgroundThrottle::new(Arc::clone(&foreground));
        for _ in 0..3 {
            throttle.resumed_at -= WORK_SLICE;
            throttle.yield_now();
        }
    }
}
