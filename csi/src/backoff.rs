//! Exponential back-off between attempts.

use std::time::Duration;

const MIN_DELAY: Duration = Duration::from_secs(1);
const MAX_DELAY: Duration = Duration::from_secs(30);

/// Delays that double from one second to thirty.
#[derive(Debug)]
pub(crate) struct ExponentialBackoff(Duration);

impl ExponentialBackoff {
    pub(crate) fn new() -> Self {
        Self(MIN_DELAY)
    }

    pub(crate) fn reset(&mut self) {
        self.0 = MIN_DELAY;
    }

    /// Returns the delay before the next attempt, and doubles the one after it.
    pub(crate) fn next(&mut self) -> Duration {
        let due = self.0;
        self.0 = (due * 2).min(MAX_DELAY);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_and_restart_after_reset() {
        let mut backoff = ExponentialBackoff::new();
        let seconds: Vec<u64> = (0..7).map(|_| backoff.next().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 30, 30]);
        backoff.reset();
        assert_eq!(backoff.next(), MIN_DELAY);
    }
}
