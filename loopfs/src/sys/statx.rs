//! `statx(2)`, for the fields that stat(2) does not return.

use std::ffi::CStr;
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, CWD, Statx, StatxAttributes, StatxFlags, statx};

use super::result::{Result, errno};

/// Returns `stx_mnt_id` (Linux 5.8), the id of the mount through which the file was opened. It is the first field of a line
/// of `/proc/self/mountinfo`. Returns `None` if the kernel does not report it.
pub(crate) fn mount_id(file: impl AsFd) -> Result<Option<u64>> {
    let status = read(file, StatxFlags::MNT_ID)?;
    Ok(reports(&status, StatxFlags::MNT_ID).then_some(status.stx_mnt_id))
}

/// Returns `true` if the file is the root of a mount (`STATX_ATTR_MOUNT_ROOT`, Linux 5.8).
pub(crate) fn is_mount_root(file: impl AsFd) -> Result<bool> {
    Ok(has_mount_root(&read(file, StatxFlags::empty())?))
}

/// As [`is_mount_root`], for the file of this name in a directory. Does not follow a symbolic link.
pub(crate) fn is_mount_root_at(directory: impl AsFd, name: &CStr) -> Result<bool> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    statx(directory, name, flags, StatxFlags::empty()).map_err(errno).map(|status| has_mount_root(&status))
}

/// The root of a mount, as the path of its mount point shows it.
pub(crate) struct MountedFile {
    /// `stx_mnt_id`. Another mount than expected may cover the path.
    pub(crate) mount: u64,
    pub(crate) mode: u32,
    /// `stx_rdev_major` and `stx_rdev_minor` of a device node.
    pub(crate) rdev: (u32, u32),
}

/// Returns the file at a path. Returns `None` if the kernel does not report its mount (before Linux 5.8).
pub(crate) fn mounted_file(path: &CStr) -> Result<Option<MountedFile>> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let status = statx(CWD, path, flags, StatxFlags::MNT_ID | StatxFlags::TYPE).map_err(errno)?;
    Ok(reports(&status, StatxFlags::MNT_ID).then_some(MountedFile {
        mount: status.stx_mnt_id,
        mode: status.stx_mode.into(),
        rdev: (status.stx_rdev_major, status.stx_rdev_minor),
    }))
}

/// Returns `stx_dio_offset_align` (Linux 6.1), the alignment of direct I/O on the file in bytes. Returns 512 if the kernel
/// does not report it.
pub(crate) fn direct_io_alignment(file: impl AsFd) -> Result<u32> {
    let status = read(file, StatxFlags::DIOALIGN)?;
    let reported = reports(&status, StatxFlags::DIOALIGN) && status.stx_dio_offset_align != 0;
    Ok(if reported { status.stx_dio_offset_align } else { 512 })
}

fn has_mount_root(status: &Statx) -> bool {
    (status.stx_attributes & status.stx_attributes_mask).contains(StatxAttributes::MOUNT_ROOT)
}

fn reports(status: &Statx, field: StatxFlags) -> bool {
    status.stx_mask & field.bits() != 0
}

fn read(file: impl AsFd, mask: StatxFlags) -> Result<Statx> {
    statx(file, c"", AtFlags::EMPTY_PATH, mask).map_err(errno)
}
