//! What is promised to volumes that are being made, and by whom who still lives.
//!
//! Between the promise and the volume, a promise is a number in the account and nothing else. A maker that dies there
//! would leave it for good. So each maker locks (`F_OFD_SETLK`, fcntl(2)) a range of the account's file, far past its
//! end, which is as many bytes long as 4096-byte units are promised: the kernel drops it with the maker, and all the
//! locks together say what is promised to those who live.

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::descriptor::reopen;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::file_lock::lock_of;
use crate::sys::random;
use crate::units::Bytes;

const OPERATION: &str = "set space aside in";
const OBJECT: &str = ".loopfs/promised";

const UNIT: u64 = 4096;
/// Places for locks, each as long as the most that can be promised, and all of them together as long as a file can be.
const SLOTS: i64 = 1 << 12;
const SLOT_SIZE: i64 = 1 << 50;

/// A promise whose maker lives.
#[derive(Debug)]
pub(super) struct PendingLock {
    _lock: OwnedFd,
    /// What the lock says: whole units.
    pub(super) bytes: Bytes,
}

impl PendingLock {
    /// The account must be locked.
    pub(super) fn new(account: impl AsFd, bytes: Bytes) -> Result<Self> {
        // A file description of its own: each has one lock at most, so none are merged.
        let file = reopen(account.as_fd(), OFlag::O_RDWR).context("open", OBJECT)?;
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
        let detail = format!("{SLOTS} volumes are being made at once");
        Err(Error::new(ErrorKind::Busy, OPERATION, OBJECT, detail))
    }
}

/// What is promised by those who live. The account must be locked.
pub(super) fn live_total(account: impl AsFd) -> Result<Bytes> {
    let account = account.as_fd();
    let mut units = 0u64;
    // First byte and the one after the last. The kernel answers any lock of a range, not the first.
    let mut ranges = vec![(0, i64::MAX)];
    while let Some((start, end)) = ranges.pop() {
        if start >= end {
            continue;
        }
        let mut found = lock_of(libc::F_WRLCK, start, end - start);
        fcntl(account, FcntlArg::F_OFD_GETLK(&mut found)).context("list the locks of", OBJECT)?;
        if i32::from(found.l_type) == libc::F_UNLCK {
            continue;
        }
        // A lock of somebody else, from end to end: it hides the others.
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
    fn what_is_pending_is_what_its_makers_hold() {
        let account = tempfile::NamedTempFile::new().unwrap();
        let live_total = || live_total(account.as_file()).unwrap();
        assert_eq!(live_total(), Bytes(0));
        let mut pending: Vec<PendingLock> = (1..=100)
            .map(|units| PendingLock::new(account.as_file(), Bytes(units * UNIT)).unwrap())
            .collect();
        assert_eq!(live_total(), Bytes(5050 * UNIT));
        pending.retain(|pending| (pending.bytes.0 / UNIT).is_multiple_of(2));
        assert_eq!(live_total(), Bytes(2550 * UNIT));
        drop(pending);
        assert_eq!(live_total(), Bytes(0));
    }

    #[test]
    fn any_size_is_said_in_whole_units() {
        let account = tempfile::NamedTempFile::new().unwrap();
        for (bytes, said) in [(0, UNIT), (1, UNIT), (UNIT + 1, 2 * UNIT), (u64::MAX, SLOT_SIZE as u64 * UNIT)]
        {
            let pending = PendingLock::new(account.as_file(), Bytes(bytes)).unwrap();
            assert_eq!((pending.bytes, live_total(account.as_file()).unwrap()), (Bytes(said), Bytes(said)));
        }
    }

    #[test]
    fn a_maker_that_dies_holds_nothing() {
        let account = tempfile::NamedTempFile::new().unwrap();
        let copy = PendingLock::new(account.as_file(), Bytes(UNIT)).unwrap();
        // As in a child: a descriptor more of the same description.
        let inherited = copy._lock.try_clone().unwrap();
        drop(copy);
        assert_eq!(live_total(account.as_file()).unwrap(), Bytes(UNIT));
        drop(inherited);
        assert_eq!(live_total(account.as_file()).unwrap(), Bytes(0));
    }
}
