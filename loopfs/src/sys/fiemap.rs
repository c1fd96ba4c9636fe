//! `FS_IOC_FIEMAP` (linux/fiemap.h; Documentation/filesystems/fiemap.rst of the kernel): lists the extents of a
//! file.

use std::os::fd::AsFd;

use linux_raw_sys::ioctl::FS_IOC_FIEMAP;
pub(crate) use linux_raw_sys::ioctl::{FIEMAP_EXTENT_LAST as LAST, FIEMAP_EXTENT_SHARED as SHARED};

use super::ioctl;
use super::result::Result;

/// `struct fiemap_extent`: one range of a file, all in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FiemapExtent {
    pub(crate) logical: u64,
    pub(crate) physical: u64,
    pub(crate) length: u64,
    reserved64: [u64; 2],
    pub(crate) flags: u32,
    reserved: [u32; 3],
}

/// Number of extents requested per call. They take about 28 KiB.
const BATCH: usize = 512;

/// `struct fiemap` with its array of extents.
#[repr(C)]
struct FiemapRequest {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; BATCH],
}

/// Returns the extents of a file from offset `start` on, in order. It returns at most 512 extents, and none if the file
/// has no more.
pub(crate) fn extents(file: impl AsFd, start: u64) -> Result<Vec<FiemapExtent>> {
    let request = FiemapRequest {
        start,
        length: u64::MAX - start,
        flags: 0,
        mapped_extents: 0,
        extent_count: BATCH as u32,
        reserved: 0,
        extents: [FiemapExtent::default(); BATCH],
    };
    // SAFETY: FS_IOC_FIEMAP reads a `struct fiemap`, and writes that structure and at most `extent_count` extents after it.
    let request = unsafe { ioctl::with(file, FS_IOC_FIEMAP, request) }?;
    Ok(request.extents[..request.mapped_extents as usize].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_match_the_kernel_headers() {
        assert_eq!(size_of::<FiemapExtent>(), 56);
        assert_eq!(std::mem::offset_of!(FiemapExtent, flags), 40);
        assert_eq!(std::mem::offset_of!(FiemapRequest, extents), 32);
    }
}
