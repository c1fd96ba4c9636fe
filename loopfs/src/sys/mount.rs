//! `open_tree(2)`, `mount_setattr(2)` and `move_mount(2)` (Linux 5.2 and 5.12).

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use linux_raw_sys::general as uapi;
use nix::errno::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
pub(crate) use uapi::{
    MOUNT_ATTR__ATIME, MOUNT_ATTR_NOATIME, MOUNT_ATTR_NODEV, MOUNT_ATTR_NODIRATIME, MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY, MOUNT_ATTR_STRICTATIME, mount_attr,
};

use super::result::{Result, errno};

/// `open_tree(source, "", OPEN_TREE_CLONE | AT_EMPTY_PATH)`: creates a detached bind mount of `source`.
pub(crate) fn clone_tree(source: impl AsFd) -> Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    open_tree(source, c"", flags).map_err(errno)
}

/// `mount_setattr(tree, "", AT_EMPTY_PATH, attributes)`, which rustix does not wrap.
pub(crate) fn set_attributes(tree: impl AsFd, attributes: &mount_attr) -> Result<()> {
    let fd = tree.as_fd().as_raw_fd();
    // SAFETY: mount_setattr reads a NUL-terminated path and one `struct mount_attr` of the given size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd,
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            attributes as *const mount_attr,
            size_of::<mount_attr>(),
        )
    };
    Errno::result(result).map(drop)
}

/// `move_mount(tree, "", directory, target)`: attaches the detached mount at `target`, which is relative to the directory. The kernel
/// does not follow a symbolic link in the last component of `target`.
pub(crate) fn attach_tree(tree: impl AsFd, directory: impl AsFd, target: &CStr) -> Result<()> {
    move_mount(tree, c"", directory, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_matches_mount_h() {
        assert_eq!(size_of::<mount_attr>(), uapi::MOUNT_ATTR_SIZE_VER0 as usize);
    }
}
