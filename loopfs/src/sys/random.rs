//! `getrandom(2)`.

use rustix::rand::{GetRandomFlags, getrandom};

use super::result::{Result, errno};

/// Returns a random number of 64 bits.
pub(crate) fn number() -> Result<u64> {
    let mut bytes = [0; 8];
    // A read of up to 256 bytes is never short once the entropy pool is initialised (getrandom(2)).
    getrandom(&mut bytes, GetRandomFlags::empty()).map_err(errno)?;
    Ok(u64::from_ne_bytes(bytes))
}
