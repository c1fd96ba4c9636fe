//! Calls to the kernel that only tests need. This module is not part of the API.

use std::ffi::CString;
use std::io::Result;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use linux_raw_sys::general::{FS_XFLAG_HASATTR, FS_XFLAG_PREALLOC, FS_XFLAG_PROJINHERIT, MOUNT_ATTR_IDMAP};

use crate::project_quota::{self, ProjectId};
use crate::sys::mount::mount_attr;
use crate::sys::quotactl::DiskQuota;
use crate::sys::{self, fiemap, fsxattr, loop_abi, loop_dev, quotactl};

const NOT_CHOSEN: u32 = FS_XFLAG_PROJINHERIT | FS_XFLAG_PREALLOC | FS_XFLAG_HASATTR;

/// `BLKDISCARD` of a range of an open device, in bytes.
pub fn discard(device: impl AsFd, start: u64, length: u64) -> Result<()> {
    Ok(sys::test_calls::discard(device, start, length)?)
}

/// Returns the `FS_XFLAG_*` of a file or directory and its two extent size hints in bytes. The project inheritance flag and
/// the read-only flags are left out.
pub fn flags(file: impl AsFd) -> Result<(u32, u32, u32)> {
    let read = fsxattr::get(file)?;
    Ok((read.fsx_xflags & !NOT_CHOSEN, read.fsx_extsize, read.fsx_cowextsize))
}

/// Sets the flags and hints that [`flags`] returns.
pub fn set_flags(file: impl AsFd, (flags, extent, cow_extent): (u32, u32, u32)) -> Result<()> {
    let mut stored = fsxattr::get(&file)?;
    stored.fsx_xflags = stored.fsx_xflags & NOT_CHOSEN | flags;
    (stored.fsx_extsize, stored.fsx_cowextsize) = (extent, cow_extent);
    Ok(fsxattr::set(file, &stored)?)
}

/// Puts a file into a project.
pub fn set_project_of_file(file: impl AsFd, project: u32) -> Result<()> {
    let mut stored = fsxattr::get(&file)?;
    stored.fsx_projid = project;
    Ok(fsxattr::set(file, &stored)?)
}

/// Changes the project of a directory that has any content, as its owner can.
pub fn set_project(directory: impl AsFd, id: ProjectId) -> crate::Result<()> {
    project_quota::set_project(directory.as_fd(), id)
}

/// Sets a limit of `blocks` units of 512 bytes that all projects without limits get. 0 removes it.
pub fn set_default_limit(fs: impl AsFd, blocks: u64) -> Result<()> {
    let fieldmask = quotactl::FS_DQ_BHARD;
    set_limits(fs, DiskQuota { fieldmask, blk_hardlimit: blocks, ..DiskQuota::default() })
}

/// Sets the soft limit of a project to `blocks` units of 512 bytes.
pub fn set_soft_limit(fs: impl AsFd, id: ProjectId, blocks: u64) -> Result<()> {
    let fieldmask = quotactl::FS_DQ_BSOFT;
    set_limits(fs, DiskQuota { id: id.get(), fieldmask, blk_softlimit: blocks, ..DiskQuota::default() })
}

/// Returns the soft limit of a project that has usage or limits. It is 0 without one.
pub fn soft_limit(fs: impl AsFd, id: ProjectId) -> Result<u64> {
    Ok(quotactl::get(fs.as_fd(), id.get())?.blk_softlimit)
}

fn set_limits(fs: impl AsFd, quota: DiskQuota) -> Result<()> {
    let (version, flags) = (quotactl::FS_DQUOT_VERSION, quotactl::FS_PROJ_QUOTA);
    Ok(quotactl::set_limits(fs.as_fd(), &mut DiskQuota { version, flags, ..quota })?)
}

/// Sets or clears `FS_XFLAG_PROJINHERIT` of a directory.
pub fn set_project_inheritance(directory: impl AsFd, inherit: bool) -> Result<()> {
    let mut stored = fsxattr::get(&directory)?;
    stored.fsx_xflags &= !FS_XFLAG_PROJINHERIT;
    if inherit {
        stored.fsx_xflags |= FS_XFLAG_PROJINHERIT;
    }
    Ok(fsxattr::set(directory, &stored)?)
}

/// Bind-mounts `source` at `target` with owners mapped by a user namespace (`MOUNT_ATTR_IDMAP`). A container runtime mounts
/// the volumes of a pod with a user namespace in this way.
pub fn bind_mount_idmapped(source: impl AsFd, target: &Path, user_namespace: impl AsFd) -> Result<()> {
    let target = CString::new(target.as_os_str().as_bytes())?;
    let attributes = mount_attr {
        attr_set: u64::from(MOUNT_ATTR_IDMAP),
        attr_clr: 0,
        propagation: 0,
        userns_fd: u64::from(user_namespace.as_fd().as_raw_fd().cast_unsigned()),
    };
    let tree = sys::mount::clone_tree(source.as_fd())?;
    sys::mount::set_attributes(&tree, &attributes)?;
    Ok(sys::mount::attach_tree(tree, rustix::fs::CWD, &target)?)
}

/// Returns the number of extents of a file, and how many of them are shared with other files.
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

/// Binds a file to the lowest free index as other programs do, without the locks and records of this library. Returns the
/// index.
pub fn bind_as_another_program(file: impl AsFd) -> Result<u32> {
    let index = loop_dev::get_free(loop_dev::open_control()?)?;
    let device = loop_dev::open_device(index, true)?;
    loop_dev::configure(device, &loop_abi::config(file.as_fd().as_raw_fd(), 512))?;
    Ok(index)
}
