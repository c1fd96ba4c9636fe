//! Per-object exponential back-off that a change of the retry key cuts short.
//!
//! The back-off of kube and backon is the waits of one series: it knows no objects, and no reason to begin again.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use service::Delays;

/// The waits after a failure, whose cause will probably last.
pub(crate) const FAILURE: Delays =
    Delays { first: Duration::from_secs(1), longest: Duration::from_secs(5 * 60) };

/// The waits after a conflict, which the watch will probably have resolved by the first retry.
pub(crate) const CONFLICT: Delays =
    Delays { first: Duration::from_millis(200), longest: Duration::from_secs(10) };

/// The waits of different objects after the same number of failures differ by less than this share of the shortest one.
const SPREAD: f64 = 0.25;

/// Failed attempts by object.
///
/// `C` is the retry key: the values on which the outcome depended, for instance the requested size and the retry generation.
/// An attempt with another retry key is not a repetition: it is allowed immediately and starts a new series. With the same
/// retry key nothing shortens the wait, in particular not the watch events that a failure's own status update and events
/// cause.
#[derive(Debug)]
pub(crate) struct Backoff<K, C> {
    delays: Delays,
    failures: Mutex<Failures<K, C>>,
}

#[derive(Debug)]
struct Failures<K, C> {
    by_object: HashMap<K, FailureSeries<C>>,
    /// When objects that are not retried any more are next removed. `None` before the first failure.
    purge_at: Option<Instant>,
}

#[derive(Debug)]
struct FailureSeries<C> {
    retry_key: C,
    attempts: u32,
    retry_at: Instant,
}

impl<K, C> Default for Backoff<K, C> {
    fn default() -> Self {
        Backoff::new(FAILURE)
    }
}

impl<K, C> Backoff<K, C> {
    pub(crate) fn new(delays: Delays) -> Self {
        Backoff { delays, failures: Mutex::new(Failures { by_object: HashMap::new(), purge_at: None }) }
    }
}

impl<K, C> Failures<K, C> {
    /// Removes objects that are not retried any more. An object that is retried fails again well before `longest` has passed since
    /// its retry was due. The removal looks at all objects, so it happens once in that time, and not with each failure: if the
    /// objects of a whole cluster fail at once, that would be a number of steps that grows with the square of theirs.
    fn purge_if_due(&mut self, longest: Duration, now: Instant) {
        if self.purge_at.is_some_and(|due| now < due) {
            return;
        }
        self.purge_at = Some(now + longest);
        self.by_object.retain(|_, failure| now < failure.retry_at + longest);
    }
}

impl<K: Hash + Eq, C: PartialEq> Backoff<K, C> {
    /// Returns the remaining wait, or `None` if an attempt is allowed now.
    pub(crate) fn remaining(&self, key: &K, retry_key: &C, now: Instant) -> Option<Duration> {
        let failures = self.failures.lock();
        let failure = failures.by_object.get(key).filter(|failure| failure.retry_key == *retry_key)?;
        let remaining = failure.retry_at.saturating_duration_since(now);
        (!remaining.is_zero()).then_some(remaining)
    }

    /// Returns `true` if the object has failed and not succeeded since, with whatever retry key.
    pub(crate) fn has_failed(&self, key: &K) -> bool {
        self.failures.lock().by_object.contains_key(key)
    }

    /// Records a failed attempt. Returns the wait before the next, which is different for each object from the second one on: an outage
    /// lets objects of all nodes fail at once, and they must not be retried at once.
    pub(crate) fn failed(&self, key: K, retry_key: C, now: Instant) -> Duration {
        let mut failures = self.failures.lock();
        failures.purge_if_due(self.delays.longest, now);
        let earlier = failures.by_object.get(&key).filter(|failure| failure.retry_key == retry_key);
        let attempts = earlier.map_or(0, |failure| failure.attempts).saturating_add(1);
        let wait = match self.delays.after(attempts) {
            wait if attempts > 1 => wait + wait.mul_f64(share_of(&key)),
            wait => wait,
        };
        failures.by_object.insert(key, FailureSeries { retry_key, attempts, retry_at: now + wait });
        wait
    }

    /// Removes an object that succeeded or was deleted.
    pub(crate) fn clear(&self, key: &K) {
        self.failures.lock().by_object.remove(key);
    }

    /// Returns the number of objects that have failed and not succeeded since.
    pub(crate) fn len(&self) -> usize {
        self.failures.lock().by_object.len()
    }

    /// Returns all objects that have failed and not succeeded since.
    pub(crate) fn keys(&self) -> Vec<K>
    where
        K: Clone,
    {
        self.failures.lock().by_object.keys().cloned().collect()
    }

    /// Keeps only the objects that `wanted` selects.
    pub(crate) fn retain(&self, wanted: impl Fn(&K) -> bool) {
        self.failures.lock().by_object.retain(|key, _| wanted(key));
    }
}

/// Returns the share of a wait by which that of an object is longer, less than [`SPREAD`]. It is the same for all waits of the object.
fn share_of(key: &impl Hash) -> f64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    SPREAD * f64::from(hasher.finish() as u32) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn waits_until_back_off_has_passed() {
        let backoff = Backoff::default();
        let start = Instant::now();
        assert_eq!(backoff.failed("claim", "10Gi", start), Duration::from_secs(1));
        let second = backoff.failed("claim", "10Gi", start);
        assert!((Duration::from_secs(2)..Duration::from_millis(2500)).contains(&second), "{second:?}");
        assert_eq!(backoff.remaining(&"claim", &"10Gi", start), Some(second));
        assert_eq!(backoff.remaining(&"claim", &"10Gi", start + second), None);
        assert_eq!(backoff.remaining(&"other", &"10Gi", start), None);
    }

    #[test]
    fn simultaneous_failures_are_retried_separately() {
        let backoff = Backoff::default();
        let start = Instant::now();
        let waits: BTreeSet<_> = (0..100)
            .map(|claim| {
                backoff.failed(claim, (), start);
                backoff.failed(claim, (), start)
            })
            .collect();
        let (shortest, longest) = (waits.first().unwrap(), waits.last().unwrap());
        assert!(waits.len() == 100 && *longest - *shortest > Duration::from_millis(400), "{waits:?}");
        assert!(*longest < Duration::from_millis(2500), "{waits:?}");
    }

    #[test]
    fn success_or_another_key_starts_again() {
        let backoff = Backoff::default();
        let start = Instant::now();
        backoff.failed("claim", "10Gi", start);
        backoff.failed("claim", "10Gi", start);
        assert_eq!(backoff.remaining(&"claim", &"5Gi", start), None);
        assert_eq!(backoff.failed("claim", "5Gi", start), Duration::from_secs(1));
        backoff.clear(&"claim");
        assert_eq!(backoff.remaining(&"claim", &"5Gi", start), None);
        assert_eq!(backoff.failed("claim", "5Gi", start), Duration::from_secs(1));
    }

    #[test]
    fn unretried_objects_are_removed() {
        let backoff = Backoff::default();
        let start = Instant::now();
        backoff.failed("rescheduled", 0, start);
        backoff.failed("claim", 0, start + FAILURE.longest);
        assert_eq!(backoff.keys().len(), 2);
        backoff.failed("claim", 0, start + 2 * FAILURE.longest);
        assert_eq!(backoff.keys(), ["claim"]);
    }

    #[test]
    fn a_failure_examines_no_others() {
        let backoff = Backoff::default();
        let start = Instant::now();
        for claim in 0..1000 {
            backoff.failed(claim, (), start + Duration::from_millis(claim));
            assert_eq!(
                backoff.failures.lock().purge_at,
                Some(start + FAILURE.longest),
                "only the first one did"
            );
        }
    }
}
