//! Work that nobody waits for gives way to what somebody waits for.
//!
//! Both take the same processors, and the same log of the file system: a claim that is provisioned while a million files
//! are removed would wait for many of them. So the removal rests while an operation is under way. Only for a moment at a
//! time, for it shall come to its end on a node that is never idle as well.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Worked between two looks at the traffic. Short beside what an operation takes.
const STRETCH: Duration = Duration::from_millis(10);
/// Waited at most, however much traffic there is.
const PATIENCE: Duration = Duration::from_millis(100);

/// The operations that are under way.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    under_way: Mutex<usize>,
    ended: Condvar,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Passage<'a>(&'a Traffic);

impl Traffic {
    pub(crate) fn enter(&self) -> Passage<'_> {
        *self.lock() += 1;
        Passage(self)
    }

    /// Returns once nothing is under way, or the time is up.
    fn until_clear(&self, at_most: Duration) {
        let waited = self.ended.wait_timeout_while(self.lock(), at_most, |under_way| *under_way > 0);
        drop(waited);
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        // Every critical section is a single step, so a panicked holder leaves it whole.
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.ended.notify_all();
    }
}

/// What makes work give way.
#[derive(Debug)]
pub(crate) struct Courtesy {
    traffic: Arc<Traffic>,
    resumed: Instant,
}

impl Courtesy {
    pub(crate) fn towards(traffic: Arc<Traffic>) -> Self {
        Courtesy { traffic, resumed: Instant::now() }
    }

    /// Blocks where it is time to. To be called between two steps of the work.
    pub(crate) fn give_way(&mut self) {
        if self.resumed.elapsed() >= STRETCH {
            self.traffic.until_clear(PATIENCE);
            self.resumed = Instant::now();
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
        let traffic = Traffic::default();
        traffic.until_clear(EVER);
        drop((traffic.enter(), traffic.enter()));
        traffic.until_clear(EVER);
    }

    #[test]
    fn the_last_to_end_lets_the_work_go_on() {
        let traffic = Traffic::default();
        let passages = [traffic.enter(), traffic.enter()];
        thread::scope(|scope| {
            let waiting = scope.spawn(|| traffic.until_clear(EVER));
            let [first, last] = passages;
            drop(first);
            assert!(!waiting.is_finished());
            drop(last);
            waiting.join().unwrap();
        });
    }

    #[test]
    fn traffic_without_end_holds_nobody_up_for_ever() {
        let traffic = Arc::new(Traffic::default());
        let _passage = traffic.enter();
        let mut courtesy = Courtesy::towards(Arc::clone(&traffic));
        for _ in 0..3 {
            courtesy.resumed -= STRETCH;
            courtesy.give_way();
        }
    }
}
