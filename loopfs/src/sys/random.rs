//! `getrandom(2)`.

use nix::errno::Errno;

use super::result::Result;

/// Returns a random number of 64 bits.
pub(crate) fn number() -> Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: getrandom writes at most the given length.
    let length = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    // A read of up to 256 bytes is never short once the entropy pool is initialised (getrandom(2)).
    Errno::result(length).map(|_| u64::from_ne_bytes(bytes))
}
