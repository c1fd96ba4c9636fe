//! A hash that is the same in every process and version.

/// Returns the FNV-1a hash of a key. The parts of the key must not contain NUL, which separates them in the hash.
pub(crate) fn fnv1a(key: &[&str]) -> u64 {
    key.join("\0")
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of CSIStorageCapacity objects depend on it: an update of the driver must find those of the version before.
    #[test]
    fn the_hash_is_fnv1a() {
        assert_eq!(fnv1a(&[""]), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(&["foobar"]), 0x8594_4171_f739_67e8);
        assert_ne!(fnv1a(&["a", "b"]), fnv1a(&["ab"]));
    }
}
