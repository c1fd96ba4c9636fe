//! Exponential back-off between attempts.

use std::time::Duration;

/// The delays after failures in a row. Each is twice as long as the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delays {
    /// The delay after the first failure.
    pub first: Duration,
    pub longest: Duration,
}

impl Delays {
    /// Returns the delay after the `attempts`-th failure in a row.
    #[must_use]
    pub fn after(self, attempts: u32) -> Duration {
        let doublings = attempts.saturating_sub(1).min(31);
        self.first.saturating_mul(1 << doublings).min(self.longest)
    }
}

/// The delays between attempts of one operation, from one second to thirty.
#[derive(Debug, Default)]
pub struct ExponentialBackoff {
    attempts: u32,
}

impl ExponentialBackoff {
    const DELAYS: Delays = Delays { first: Duration::from_secs(1), longest: Duration::from_secs(30) };

    /// Starts again with the first delay, after a success.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }

    /// Returns the delay before the next attempt, after a failure.
    pub fn next_delay(&mut self) -> Duration {
        self.attempts = self.attempts.saturating_add(1);
        Self::DELAYS.after(self.attempts)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const DELAYS: Delays = Delays { first: Duration::from_secs(1), longest: Duration::from_secs(300) };

    #[rstest]
    #[case(1, 1)]
    #[case(2, 2)]
    #[case(9, 256)]
    #[case(10, 300)]
    #[case(u32::MAX, 300)]
    fn delays_double_up_to_the_longest(#[case] attempts: u32, #[case] seconds: u64) {
        assert_eq!(DELAYS.after(attempts), Duration::from_secs(seconds));
    }

    #[test]
    fn a_success_resets_the_delay() {
        let mut backoff = ExponentialBackoff::default();
        let mut next = || backoff.next_delay().as_secs();
        assert_eq!([next(), next(), next()], [1, 2, 4]);
        backoff.reset();
        assert_eq!(backoff.next_delay().as_secs(), 1);
    }
}
