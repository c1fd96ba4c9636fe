//! Background work that uses the disk only while it is idle.

use crate::sys::io_priority;

/// The calling thread has the I/O class idle until this is dropped. An I/O scheduler then serves its reads after those of all other
/// threads. Without a scheduler on the disk, or if a seccomp profile denies the calls, nothing changes.
pub(crate) struct IdleIo {
    before: Option<libc::c_int>,
}

impl IdleIo {
    pub(crate) fn begin() -> Self {
        let before = io_priority::get().ok();
        Self { before: before.filter(|_| io_priority::set(io_priority::IDLE).is_ok()) }
    }
}

impl Drop for IdleIo {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // It was allowed before, and no class but that of real time needs a privilege.
            io_priority::set(before).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_returns_after_the_work() {
        let before = io_priority::get().unwrap();
        let idle = IdleIo::begin();
        assert_eq!(io_priority::get(), Ok(io_priority::IDLE));
        drop(idle);
        assert_eq!(io_priority::get(), Ok(before));
    }
}
