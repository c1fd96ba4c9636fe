//! The end of a wait.

use std::time::{Duration, Instant};

/// The moment at which a wait ends. A limit that the clock cannot represent, such as `Duration::MAX`, has no end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self(Instant::now().checked_add(limit))
    }

    /// Returns the remaining time, which is `Duration::MAX` if there is no end.
    pub(crate) fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_duration_has_no_end() {
        assert_eq!(Deadline::after(Duration::MAX).left(), Duration::MAX);
        assert_eq!(Deadline::after(Duration::ZERO).left(), Duration::ZERO);
        assert!(Deadline::after(Duration::from_secs(60)).left() > Duration::from_secs(1));
    }
}
