//! Mounting and unmounting: a bind mount is never visible without its flags.

use std::ffi::{CString, OsStr};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use rustix::fs::CWD;

use super::options::{AccessTime, MountFlags};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::mount::{self as sys, mount_attr};
use crate::sys::statx;

impl MountFlags {
    fn attributes(self) -> mount_attr {
        let chosen = [
            (self.read_only, sys::MOUNT_ATTR_RDONLY),
            (self.nosuid, sys::MOUNT_ATTR_NOSUID),
            (self.nodev, sys::MOUNT_ATTR_NODEV),
            (self.noexec, sys::MOUNT_ATTR_NOEXEC),
            (self.nodiratime, sys::MOUNT_ATTR_NODIRATIME),
            (self.access_time == AccessTime::Never, sys::MOUNT_ATTR_NOATIME),
            (self.access_time == AccessTime::Strict, sys::MOUNT_ATTR_STRICTATIME),
        ];
        let all = chosen.iter().fold(sys::MOUNT_ATTR__ATIME, |all, (_, flag)| all | flag);
        let set = chosen.iter().filter(|(wanted, _)| *wanted).fold(0, |set, (_, flag)| set | flag);
        mount_attr {
            attr_set: u64::from(set),
            attr_clr: u64::from(all),
            // A later mount inside the source must not appear in the copy.
            propagation: libc::MS_PRIVATE,
            userns_fd: 0,
        }
    }
}

/// Bind-mounts `source` (a directory, a file or a device node; `O_PATH` is enough) at `target`, which must exist, be of the same
/// type, and not be a symbolic link in its last component.
///
/// The call creates the mount detached, sets its flags, and only then attaches it (`open_tree`,
/// `mount_setattr`, `move_mount`; Linux 5.12).
///
/// # Errors
/// ENOENT: no such target. ENOTDIR: a part of its path is a file. EINVAL: a directory onto a file or the
/// reverse, or onto a symbolic link. EPERM: without `CAP_SYS_ADMIN`.
/// [`ErrorKind::InvalidInput`] without an errno: the path holds a NUL.
#[doc(alias = "open_tree")]
#[doc(alias = "mount_setattr")]
#[doc(alias = "move_mount")]
pub fn bind_mount(source: impl AsFd, target: &Path, flags: MountFlags) -> Result<()> {
    bind_mount_at(source, CWD, target, flags)
}

/// As [`bind_mount`], for a target relative to an open directory (`O_PATH` is enough), which another process may have moved or
/// replaced by a symbolic link.
///
/// # Errors
/// As [`bind_mount`].
#[doc(alias = "move_mount")]
pub fn bind_mount_at(
    source: impl AsFd,
    directory: impl AsFd,
    target: &Path,
    flags: MountFlags,
) -> Result<()> {
    let object = target.display();
    let path = CString::new(target.as_os_str().as_bytes())
        .map_err(|nul| Error::new(ErrorKind::InvalidInput, "mount", &object, nul.to_string()))?;
    let tree = sys::clone_tree(source).context("clone the mount for", &object)?;
    sys::set_attributes(&tree, &flags.attributes()).context("set the mount flags of", &object)?;
    sys::attach_tree(&tree, directory, &path).context("mount", &object)
}

/// Unmounts everything mounted at `target`. Returns `false` if nothing was mounted: `target` need not be a mount point nor
/// exist, so the call can be repeated. A symbolic link is not followed.
///
/// # Errors
/// EBUSY: files are open there. EPERM: without `CAP_SYS_ADMIN`.
#[doc(alias = "umount2")]
pub fn unmount(target: &Path) -> Result<bool> {
    let mut unmounted = false;
    loop {
        match umount2(target, MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => unmounted = true,
            // EINVAL: exists and is not (or no longer) a mount point.
            Err(Errno::EINVAL | Errno::ENOENT | Errno::ENOTDIR) => return Ok(unmounted),
            Err(errno) => return Err(Error::sys("unmount", target.display(), errno)),
        }
    }
}

/// Returns `true` if something is mounted at the entry of this name in a directory (statx(2), Linux 5.8). Its cost does not depend
/// on the number of mounts. Returns `false` if there is no such entry. Does not follow a symbolic link.
///
/// # Errors
/// EIO: the file system that is mounted there has shut down. [`ErrorKind::InvalidInput`] without an errno: the name holds a NUL.
pub fn is_mount_point(directory: impl AsFd, name: &OsStr) -> Result<bool> {
    let object = name.display();
    let entry = CString::new(name.as_bytes())
        .map_err(|nul| Error::new(ErrorKind::InvalidInput, "statx", &object, nul.to_string()))?;
    match statx::is_mount_root_at(directory, &entry) {
        Err(Errno::ENOENT) => Ok(false),
        result => result.context("statx", &object),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_is_set_or_cleared() {
        let attributes = MountFlags { read_only: true, nosuid: true, ..MountFlags::default() }.attributes();
        assert_eq!(attributes.attr_set, u64::from(sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID));
        for flag in [sys::MOUNT_ATTR_NODEV, sys::MOUNT_ATTR_NOEXEC, sys::MOUNT_ATTR__ATIME] {
            assert_eq!(attributes.attr_clr & u64::from(flag), u64::from(flag));
        }
    }
}
