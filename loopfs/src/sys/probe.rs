//! Checks whether system calls exist and are allowed, by calls that the kernel refuses because of their arguments.

use libc::c_long;
use nix::errno::Errno;

/// `quotactl_fd(-1, ..)`. Returns ENOSYS if the kernel does not have the call, and EPERM if a seccomp filter denies it.
pub(crate) fn quotactl_fd() -> Option<Errno> {
    refused(libc::SYS_quotactl_fd)
}

/// `open_tree(-1, NULL, 0)`. Errors as of [`quotactl_fd`].
pub(crate) fn open_tree() -> Option<Errno> {
    refused(libc::SYS_open_tree)
}

/// `mount_setattr(-1, NULL, 0, NULL, 0)`. Errors as of [`quotactl_fd`].
pub(crate) fn mount_setattr() -> Option<Errno> {
    refused(libc::SYS_mount_setattr)
}

/// `move_mount(-1, NULL, 0, NULL, 0)`. Errors as of [`quotactl_fd`]. Without `CAP_SYS_ADMIN`, the kernel returns EPERM too.
pub(crate) fn move_mount() -> Option<Errno> {
    refused(libc::SYS_move_mount)
}

fn refused(call: c_long) -> Option<Errno> {
    // Each argument has the width of a register.
    const INVALID: c_long = -1;
    const ZERO: c_long = 0;
    // SAFETY: These calls take at most five arguments. None of -1 and zeros is a descriptor or pointer that the kernel accepts.
    let result = unsafe { libc::syscall(call, INVALID, ZERO, ZERO, ZERO, ZERO) };
    Errno::result(result).err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_refuses_every_probe() {
        for errno in [quotactl_fd(), open_tree(), mount_setattr(), move_mount()] {
            assert!(errno.is_some());
        }
    }
}
