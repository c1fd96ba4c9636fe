//! `getrandom(2)`.

use nix::errno::Errno;

use super::result::Result;

/// Eight random bytes as a number.
pub(crate) fn number() -> Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: getrandom writes at most the length told.
    let length = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    // Up to 256 bytes are never returned short once the pool is initialised (getrandom(2)).
    Errno::result(length).map(|_| u64::from_ne_bytes(bytes))
}
