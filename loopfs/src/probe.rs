//! What tests ask of the kernel that the library does not. Not part of the API.

use std::io::Result;
use std::os::fd::AsFd;

use crate::sys;

/// `BLKDISCARD` of a range of an open device, in bytes.
pub fn discard(device: impl AsFd, start: u64, length: u64) -> Result<()> {
    Ok(sys::discard::discard(device, start, length)?)
}
