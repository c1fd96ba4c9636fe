//! What tests ask of the kernel that the library does not. Not part of the API.

use std::io::Result;
use std::os::fd::AsFd;

use linux_raw_sys::general::{FS_XFLAG_HASATTR, FS_XFLAG_PREALLOC, FS_XFLAG_PROJINHERIT};

use crate::sys::{self, fiemap, fsxattr};

const NOT_CHOSEN: u32 = FS_XFLAG_PROJINHERIT | FS_XFLAG_PREALLOC | FS_XFLAG_HASATTR;

/// `BLKDISCARD` of a range of an open device, in bytes.
pub fn discard(device: impl AsFd, start: u64, length: u64) -> Result<()> {
    Ok(sys::discard::discard(device, start, length)?)
}

/// `FS_XFLAG_*` of a file or directory, and its hints of the size of extents in bytes; without the flag that belongs
/// to the project and those that only report.
pub fn flags(file: impl AsFd) -> Result<(u32, u32, u32)> {
    let read = fsxattr::get(file)?;
    Ok((read.fsx_xflags & !NOT_CHOSEN, read.fsx_extsize, read.fsx_cowextsize))
}

/// Sets what [`flags`] reads.
pub fn set_flags(file: impl AsFd, (flags, extent, cow_extent): (u32, u32, u32)) -> Result<()> {
    let mut stored = fsxattr::get(&file)?;
    stored.fsx_xflags = stored.fsx_xflags & NOT_CHOSEN | flags;
    (stored.fsx_extsize, stored.fsx_cowextsize) = (extent, cow_extent);
    Ok(fsxattr::set(file, &stored)?)
}

/// How many extents a file lies in, and how many of them are shared with others.
pub fn extents(file: impl AsFd) -> Result<(usize, usize)> {
    let (mut all, mut position) = (Vec::new(), 0);
    loop {
        let extents = fiemap::extents(&file, position)?;
        let Some(last) = extents.last() else { break };
        position = last.logical + last.length;
        all.extend(extents);
    }
    Ok((all.len(), all.iter().filter(|extent| extent.flags & fiemap::SHARED != 0).count()))
}
