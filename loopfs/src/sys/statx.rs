//! `statx(2)`, for the fields that stat(2) does not return.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, Statx, StatxAttributes, StatxFlags, statx};

use super::result::{Result, errno};

/// Returns `stx_mnt_id` (Linux 5.8), the id of the mount through which the file was opened. It is the first field of a line
/// of `/proc/self/mountinfo`. Returns `None` if the kernel does not report it.
pub(crate) fn mount_id(file: impl AsFd) -> Result<Option<u64>> {
    let status = read(file, StatxFlags::MNT_ID)?;
    Ok(reports(&status, StatxFlags::MNT_ID).then_some(status.stx_mnt_id))
}

/// Returns `true` if the file is the root of a mount (`STATX_ATTR_MOUNT_ROOT`, Linux 5.8).
pub(crate) fn is_mount_root(file: impl AsFd) -> Result<bool> {
    let status = read(file, StatxFlags::empty())?;
    Ok((status.stx_attributes & status.stx_attributes_mask).contains(StatxAttributes::MOUNT_ROOT))
}

/// Returns `stx_dio_offset_align` (Linux 6.1), the alignment of direct I/O on the file in bytes. Returns 512 if the kernel
/// does not report it.
pub(crate) fn direct_io_alignment(file: impl AsFd) -> Result<u32> {
    let status = read(file, StatxFlags::DIOALIGN)?;
    let reported = reports(&status, StatxFlags::DIOALIGN) && status.stx_dio_offset_align != 0;
    Ok(if reported { status.stx_dio_offset_align } else { 512 })
}

fn reports(status: &Statx, field: StatxFlags) -> bool {
    status.stx_mask & field.bits() != 0
}

fn read(file: impl AsFd, mask: StatxFlags) -> Result<Statx> {
    statx(file, c"", AtFlags::EMPTY_PATH, mask).map_err(errno)
}
