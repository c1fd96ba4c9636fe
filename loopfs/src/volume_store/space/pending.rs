//! Reservations of images that live processes are creating or expanding.
//!
//! Until the image exists, its reservation is only a number in the record. If the process died at that point, the
//! reservation would stay for good. Each process therefore holds a lock (`F_OFD_SETLK`, fcntl(2)) on a range of the record's
//! file, far past its end, one byte long for each reserved 4096-byte unit. The kernel drops the lock when the process dies. The
//! sum of all locks is the space that live processes have reserved.

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::descriptor::reopen;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::file_lock::lock_of;
use crate::sys::random;
use crate::units::Bytes;

const OPERATION: &str = "reserve space in";
const OBJECT: &str = ".loopfs/promised";

const UNIT: u64 = 4096;
/// Slots for locks. Each is as long as the largest reservation, and all of them together are as long as a file can be.
const SLOTS: i64 = 1 << 12;
const SLOT_SIZE: i64 = 1 << 50;

/// The lock of one pending reservation, held until this is dropped or the process dies.
#[derive(Debug)]
pub(super) struct PendingLock {
    _lock: OwnedFd,
    /// The reserved bytes, in whole units: the length of the lock.
    pub(super) bytes: Bytes,
}

impl PendingLock {
    /// Reserves `bytes`, rounded up to whole units, in a random free slot. The caller has locked the record.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: no free slot was found. Those of fcntl(2).
    pub(super) fn new(record: impl AsFd, bytes: Bytes) -> Result<Self> {
        // Each lock has an open file description of its own, because the kernel merges adjacent locks of one description.
        let file = reopen(record.as_fd(), OFlag::O_RDWR).context("open", OBJECT)?;
        let units = i64::try_from(bytes.0.div_ceil(UNIT)).unwrap_or(SLOT_SIZE).clamp(1, SLOT_SIZE);
        for _ in 0..SLOTS {
            let slot = random::number().context(OPERATION, OBJECT)? % SLOTS as u64;
            let lock = lock_of(libc::F_WRLCK, slot as i64 * SLOT_SIZE, units);
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)) {
                Ok(_) => return Ok(Self { _lock: file, bytes: Bytes(units as u64 * UNIT) }),
                Err(Errno::EAGAIN | Errno::EACCES) => {}
                Err(errno) => return Err(Error::sys(OPERATION, OBJECT, errno)),
            }
        }
        let detail = format!("{SLOTS} images are being created or expanded concurrently");
        Err(Error::new(ErrorKind::Busy, OPERATION, OBJECT, detail))
    }
}

/// Returns the bytes that live processes have reserved. The caller has locked the record.
pub(super) fn live_total(record: impl AsFd) -> Result<Bytes> {
    let record = record.as_fd();
    let mut units = 0u64;
    // Ranges to search: the first byte, and the one after the last. The kernel returns any lock of a range, not the first one.
    let mut ranges = vec![(0, i64::MAX)];
    while let Some((start, end)) = ranges.pop() {
        if start >= end {
            continue;
        }
        let mut found = lock_of(libc::F_WRLCK, start, end - start);
        fcntl(record, FcntlArg::F_OFD_GETLK(&mut found)).context("list the locks of", OBJECT)?;
        if i32::from(found.l_type) == libc::F_UNLCK {
            continue;
        }
        // A lock of length 0 reaches to the end of the file. It belongs to another program, and hides all others.
        let past = if found.l_len == 0 { i64::MAX } else { found.l_start.saturating_add(found.l_len) };
        units = units.saturating_add(found.l_len.unsigned_abs());
        ranges.extend([(start, found.l_start), (past, end)]);
    }
    Ok(Bytes(units.saturating_mul(UNIT)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_live_total_is_the_sum_of_the_locks_held() {
        let record = tempfile::NamedTempFile::new().unwrap();
        let live_total = || live_total(record.as_file()).unwrap();
        assert_eq!(live_total(), Bytes(0));
        let mut pending: Vec<PendingLock> =
            (1..=100).map(|units| PendingLock::new(record.as_file(), Bytes(units * UNIT)).unwrap()).collect();
        assert_eq!(live_total(), Bytes(5050 * UNIT));
        pending.retain(|pending| (pending.bytes.0 / UNIT).is_multiple_of(2));
        assert_eq!(live_total(), Bytes(2550 * UNIT));
        drop(pending);
        assert_eq!(live_total(), Bytes(0));
    }

    #[test]
    fn a_lock_rounds_any_size_up_to_whole_units() {
        let record = tempfile::NamedTempFile::new().unwrap();
        for (bytes, expected) in
            [(0, UNIT), (1, UNIT), (UNIT + 1, 2 * UNIT), (u64::MAX, SLOT_SIZE as u64 * UNIT)]
        {
            let pending = PendingLock::new(record.as_file(), Bytes(bytes)).unwrap();
            assert_eq!(
                (pending.bytes, live_total(record.as_file()).unwrap()),
                (Bytes(expected), Bytes(expected))
            );
        }
    }

    #[test]
    fn a_reservation_ends_with_the_last_copy_of_its_descriptor() {
        let record = tempfile::NamedTempFile::new().unwrap();
        let copy = PendingLock::new(record.as_file(), Bytes(UNIT)).unwrap();
        // As a child process inherits it: one more descriptor of the same description.
        let inherited = copy._lock.try_clone().unwrap();
        drop(copy);
        assert_eq!(live_total(record.as_file()).unwrap(), Bytes(UNIT));
        drop(inherited);
        assert_eq!(live_total(record.as_file()).unwrap(), Bytes(0));
    }
}
