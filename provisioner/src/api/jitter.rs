//! Deterministic jitter: spreads the work of several provisioners that see the same change at the same time.

use std::time::Duration;

/// Returns a part of a span: the same for the same words, and practically random for different words.
pub(crate) fn jitter(words: &[&str], span: Duration) -> Duration {
    // The upper bits of the hash as a fraction of what they could be at most.
    let fraction = u32::try_from(fnv1a(words) >> 32).unwrap_or(u32::MAX);
    span.mul_f64(f64::from(fraction) / (f64::from(u32::MAX) + 1.0))
}

/// Returns the FNV-1a hash of words without NUL.
pub(crate) fn fnv1a(words: &[&str]) -> u64 {
    words
        .join("\0")
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn jitter_is_spread_over_the_span() {
        let span = Duration::from_secs(2);
        let parts: BTreeSet<_> = (0..100).map(|node| jitter(&[&format!("node-{node}"), "x"], span)).collect();
        assert_eq!(parts.len(), 100);
        assert!(parts.iter().all(|part| *part < span));
        // The parts are not crowded at one end of the span.
        let halfway = parts.iter().filter(|part| **part < span / 2).count();
        assert!((25..=75).contains(&halfway), "{halfway} of 100 in the first half");
        assert_eq!(jitter(&["a", "b"], span), jitter(&["a", "b"], span));
    }
}
