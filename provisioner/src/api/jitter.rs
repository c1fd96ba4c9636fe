//! Deterministic jitter: spreads the work of several provisioners that see the same change at the same time.

use std::time::Duration;

/// Returns a delay from zero to `max`. It is the same whenever `key` is the same, and practically random for different keys.
pub(crate) fn jitter(key: &[&str], max: Duration) -> Duration {
    let upper_bits = (fnv1a(key) >> 32) as u32;
    max.mul_f64(f64::from(upper_bits) / (f64::from(u32::MAX) + 1.0))
}

/// Returns the FNV-1a hash of a key. The parts of the key must not contain NUL, which separates them in the hash.
pub(crate) fn fnv1a(key: &[&str]) -> u64 {
    key.join("\0")
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn delays_of_different_keys_are_spread_evenly() {
        let max = Duration::from_secs(2);
        let delays: BTreeSet<_> = (0..100).map(|node| jitter(&[&format!("node-{node}"), "x"], max)).collect();
        assert_eq!(delays.len(), 100);
        assert!(delays.iter().all(|delay| *delay < max));
        let short = delays.iter().filter(|delay| **delay < max / 2).count();
        assert!((25..=75).contains(&short), "{short} of 100 delays are less than half of the maximum");
        assert_eq!(jitter(&["a", "b"], max), jitter(&["a", "b"], max));
    }
}
