//! Checks whether system calls exist and are allowed, by calls that the kernel refuses because of their arguments.

use libc::c_long;
use nix::errno::Errno;

/// Makes each system call that the library needs and that an early kernel lacks or a seccomp filter may deny, with arguments that no
/// kernel accepts. Returns the names of the calls, and the errno of each: ENOSYS if the kernel does not have the call, EPERM if a
/// filter denies it. Without `CAP_SYS_ADMIN`, the kernel returns EPERM for `move_mount` too.
#[must_use]
pub fn probe_system_calls() -> [(&'static str, i32); 4] {
    [
        // quotactl_fd(-1, ..)
        ("quotactl_fd", refused(libc::SYS_quotactl_fd)),
        // open_tree(-1, NULL, 0)
        ("open_tree", refused(libc::SYS_open_tree)),
        // mount_setattr(-1, NULL, 0, NULL, 0)
        ("mount_setattr", refused(libc::SYS_mount_setattr)),
        // move_mount(-1, NULL, 0, NULL, 0)
        ("move_mount", refused(libc::SYS_move_mount)),
    ]
}

/// Returns the errno of a call, or 0 if it succeeds.
fn refused(call: c_long) -> i32 {
    // Each argument has the width of a register.
    const INVALID: c_long = -1;
    const ZERO: c_long = 0;
    // SAFETY: These calls take at most five arguments. None of -1 and zeros is a descriptor or pointer that the kernel accepts.
    let result = unsafe { libc::syscall(call, INVALID, ZERO, ZERO, ZERO, ZERO) };
    Errno::result(result).err().map_or(0, |errno| errno as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_refuses_every_probe() {
        for (name, errno) in probe_system_calls() {
            assert_ne!(errno, 0, "{name}");
        }
    }
}
