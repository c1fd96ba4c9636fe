//! The I/O priority of the calling thread: `ioprio_get(2)` and `ioprio_set(2)`.

use nix::errno::Errno;

use super::result::Result;

/// `IOPRIO_WHO_PROCESS` with the id 0: the calling thread.
const THIS_THREAD: [libc::c_int; 2] = [1, 0];

/// The class `IOPRIO_CLASS_IDLE`, which has no levels, as `IOPRIO_PRIO_VALUE` composes it.
pub(crate) const IDLE: libc::c_int = 3 << 13;

/// Returns the priority of the calling thread.
pub(crate) fn get() -> Result<libc::c_int> {
    let [which, who] = THIS_THREAD;
    // SAFETY: the call takes no pointers.
    let priority = unsafe { libc::syscall(libc::SYS_ioprio_get, which, who) };
    Errno::result(priority).map(|priority| priority as libc::c_int)
}

/// Sets the priority of the calling thread.
pub(crate) fn set(priority: libc::c_int) -> Result<()> {
    let [which, who] = THIS_THREAD;
    // SAFETY: the call takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_ioprio_set, which, who, priority) };
    Errno::result(result).map(drop)
}
