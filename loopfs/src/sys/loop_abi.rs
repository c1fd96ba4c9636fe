//! Structures and constants of the loop driver (linux/loop.h).

use linux_raw_sys::loop_device as uapi;
pub(crate) use uapi::{loop_config, loop_info64};

pub(crate) const READ_ONLY: u32 = uapi::LO_FLAGS_READ_ONLY as u32;
pub(crate) const AUTOCLEAR: u32 = uapi::LO_FLAGS_AUTOCLEAR as u32;
pub(crate) const PARTITION_SCAN: u32 = uapi::LO_FLAGS_PARTSCAN as u32;
pub(crate) const DIRECT_IO: u32 = uapi::LO_FLAGS_DIRECT_IO as u32;

/// Maximum length of a label in bytes. The kernel adds the terminating NUL.
pub(crate) const LABEL_SIZE: usize = uapi::LO_NAME_SIZE as usize - 1;

/// Minor numbers have 20 bits (linux/kdev_t.h).
const MINOR_BITS: u32 = 20;

/// Returns the first index that no device can have. With the module parameter `max_part`, a device takes as many minor numbers as
/// the next power of two above `max_part`.
pub(crate) const fn index_limit_of(max_part: u32) -> u32 {
    let shift = u32::BITS - max_part.leading_zeros();
    if shift < MINOR_BITS { 1 << (MINOR_BITS - shift) } else { 1 }
}

/// A limit of the discards that a device accepts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiscardLimit {
    /// The largest discard that is currently enabled; 0 disables discards.
    Set,
    /// The largest discard that the driver supports.
    Hardware,
    /// The granularity: other limits must be multiples of it.
    Unit,
}

pub(crate) const fn empty_info() -> loop_info64 {
    loop_info64 {
        lo_device: 0,
        lo_inode: 0,
        lo_rdevice: 0,
        lo_offset: 0,
        lo_sizelimit: 0,
        lo_number: 0,
        lo_encrypt_type: 0,
        lo_encrypt_key_size: 0,
        lo_flags: 0,
        lo_file_name: [0; 64],
        lo_crypt_name: [0; 64],
        lo_encrypt_key: [0; 32],
        lo_init: [0; 2],
    }
}

pub(crate) const fn config(file: i32, block_size: u32) -> loop_config {
    loop_config { fd: file as u32, block_size, info: empty_info(), __reserved: [0; 8] }
}
