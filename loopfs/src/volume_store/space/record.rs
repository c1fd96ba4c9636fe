//! The reservation record: the total of all reservations, shared by all processes that use the store.
//!
//! It is an extended attribute of a file, read and written under the lock of that file. It therefore takes no blocks, which
//! would have to be part of the total. It is never made durable and is valid only in the boot that wrote it. Without a valid
//! record the total is counted from the volumes, and so it is after a process died while it created a volume.
//!
//! **Pending reservations.** Until an image exists, its reservation is only a number in the record. If the process died at that
//! point, the reservation would stay for good. Each process therefore holds a lock (`F_OFD_SETLK`, fcntl(2)) on a range of the
//! record's file, far past its end, one byte long for each reserved 4096-byte unit. The kernel drops the lock when the process
//! dies. The sum of all locks is the space that live processes have reserved.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::reservation::Reservation;
use crate::boot::Boot;
use crate::descriptor::reopen;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::flock::QueuedLock;
use crate::project_quota::Usage;
use crate::sys::file_lock::lock_of;
use crate::sys::{random, xattr};
use crate::units::{Bytes, Inodes};
use crate::volume_store::on_disk::layout::{self, Layout};

const FILE: &str = ".loopfs/promised";
const NAME: &CStr = c"trusted.loopfs.promised";

/// Written in place of a total that has yet to be counted.
const UNKNOWN: &str = "-";
/// Written before a total that is an upper bound.
const UPPER_BOUND: &str = "~";

/// The unit of pending reservations: each takes one byte of a lock.
const UNIT: u64 = 4096;
/// Slots for locks. Each is as long as the largest reservation, and all of them together are as long as a file can be.
const SLOTS: i64 = 1 << 12;
const SLOT_SIZE: i64 = 1 << 50;

/// What no further volume can reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reserved {
    /// Reserved for volumes, including deleted volumes in the trash.
    pub(super) volumes: Bytes,
    /// The inodes that can be in use at once: the limits of directories, images, and files outside of volumes.
    pub(super) inodes: Inodes,
    /// Used, but by no volume: metadata of the file system, and files that do not belong to the store.
    pub(super) overhead: Bytes,
    /// `false` if these are only upper bounds, which a later count can lower.
    pub(super) exact: bool,
}

impl Reserved {
    /// Returns `true` if these are no higher than `other`.
    pub(super) fn is_within(&self, other: &Self) -> bool {
        let sum = |of: &Self| of.volumes.saturating_add(of.overhead);
        sum(self) <= sum(other) && self.inodes <= other.inodes
    }

    /// Adds the reservation of a volume.
    pub(super) fn add(&mut self, reservation: Reservation) {
        self.volumes = self.volumes.saturating_add(reservation.bytes);
        self.inodes = Inodes(self.inodes.0.saturating_add(reservation.inodes.0));
    }
}

/// The content of the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReservationTotals {
    /// Reserved for images that are being created or expanded, and which a count may therefore not find. In whole units, as
    /// the locks of [`PendingLock`] hold them.
    pub(super) pending: Bytes,
    /// The total of all reservations, pending ones included; `None` if it has yet to be counted.
    pub(super) total: Option<Reserved>,
}

impl ReservationTotals {
    /// Returns the same totals, marked as inexact: the next call that returns the space counts them again.
    pub(super) fn upper_bound(self) -> Self {
        Self { total: self.total.map(|total| Reserved { exact: false, ..total }), ..self }
    }

    /// Releases the reservation of a volume that no longer exists.
    pub(super) fn release(&mut self, reservation: Reservation) {
        if let Some(total) = &mut self.total {
            let Reservation { bytes, inodes } =
                Reservation { bytes: total.volumes, inodes: total.inodes }.saturating_sub(reservation);
            (total.volumes, total.inodes) = (bytes, inodes);
        }
    }

    /// Releases what the limit of a project reserved. The caller has removed that limit.
    pub(super) fn release_limit(&mut self, cleared: &Usage) {
        let limits = cleared.limits;
        self.release(Reservation {
            bytes: limits.bytes.unwrap_or_default(),
            inodes: limits.inodes.unwrap_or_default(),
        });
    }
}

/// The reservation record, locked until this is dropped. The holder waits for no other lock except that of the project ids.
#[derive(Debug)]
pub(super) struct ReservationRecord<'a> {
    pub(super) file: QueuedLock<'a>,
    boot: &'a Boot,
}

impl<'a> ReservationRecord<'a> {
    /// Locks the record, so that no other thread or process changes it.
    pub(super) fn lock(layout: &'a Layout) -> Result<Self> {
        // If an administrator has removed the file, the total is counted again.
        let file = layout::open_file(&layout.private, "promised", OFlag::O_RDWR | OFlag::O_CREAT)?;
        let operation = "account for space, which takes the lock";
        let file = layout.record_queue.exclusive(file, layout.lock_timeout, operation)?;
        Ok(Self { file, boot: &layout.boot })
    }

    /// Reads the totals of this boot. If a process died with a pending reservation, the total is unknown.
    pub(super) fn read(&self) -> Result<ReservationTotals> {
        let text = xattr::get(&*self.file, NAME).context("read", FILE)?.unwrap_or_default();
        let totals = parse(&String::from_utf8_lossy(&text), self.boot).unwrap_or_default();
        if totals.pending == Bytes(0) {
            return Ok(totals);
        }
        let live = live_total(&*self.file)?;
        if live == totals.pending {
            return Ok(totals);
        }
        // A process has died. Only a count shows whether it died before or after it created the image.
        Ok(ReservationTotals { pending: live, total: None })
    }

    /// Writes the totals.
    pub(super) fn write(&self, totals: ReservationTotals) -> Result<()> {
        xattr::set(&*self.file, NAME, print(totals, self.boot).as_bytes()).context("write", FILE)
    }
}

/// The lock of one pending reservation, held until this is dropped or the process dies.
#[derive(Debug)]
pub(super) struct PendingLock {
    _lock: OwnedFd,
    /// The reserved bytes, in whole units: the length of the lock.
    pub(super) bytes: Bytes,
}

impl PendingLock {
    /// Reserves `bytes`, rounded up to whole units, in a random free slot. The caller has locked the
    /// record, and writes the totals afterwards.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: no free slot was found. Those of fcntl(2).
    pub(super) fn new(record: impl AsFd, bytes: Bytes) -> Result<Self> {
        const OPERATION: &str = "reserve space in";
        // Each lock has an open file description of its own, because the kernel merges adjacent locks of one description.
        let file = reopen(record.as_fd(), OFlag::O_RDWR).context("open", FILE)?;
        let units = i64::try_from(bytes.0.div_ceil(UNIT)).unwrap_or(SLOT_SIZE).clamp(1, SLOT_SIZE);
        for _ in 0..SLOTS {
            let slot = random::number().context(OPERATION, FILE)? % SLOTS as u64;
            let lock = lock_of(libc::F_WRLCK, slot as i64 * SLOT_SIZE, units);
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)) {
                Ok(_) => return Ok(Self { _lock: file, bytes: Bytes(units as u64 * UNIT) }),
                Err(Errno::EAGAIN | Errno::EACCES) => {}
                Err(errno) => return Err(Error::sys(OPERATION, FILE, errno)),
            }
        }
        let detail = format!("{SLOTS} images are being created or expanded concurrently");
        Err(Error::new(ErrorKind::Busy, OPERATION, FILE, detail))
    }
}

/// Returns the bytes that live processes have reserved. The caller has locked the record.
fn live_total(record: impl AsFd) -> Result<Bytes> {
    let record = record.as_fd();
    let mut units = 0u64;
    // Ranges to search: the first byte, and the one after the last. The kernel returns any lock of a range, not the first one.
    let mut ranges = vec![(0, i64::MAX)];
    while let Some((start, end)) = ranges.pop() {
        if start >= end {
            continue;
        }
        let mut found = lock_of(libc::F_WRLCK, start, end - start);
        fcntl(record, FcntlArg::F_OFD_GETLK(&mut found)).context("list the locks of", FILE)?;
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

fn print(totals: ReservationTotals, Boot(boot): &Boot) -> String {
    let ReservationTotals { pending: Bytes(pending), total } = totals;
    let total = total.map_or(UNKNOWN.to_owned(), |total| {
        let Reserved { volumes: Bytes(volumes), inodes: Inodes(inodes), overhead: Bytes(overhead), exact } =
            total;
        format!("{}{volumes} {inodes} {overhead}", if exact { "" } else { UPPER_BOUND })
    });
    format!("{boot} {pending} {total}")
}

/// Returns `None` if the text was not written in this boot.
fn parse(text: &str, Boot(boot): &Boot) -> Option<ReservationTotals> {
    let (written_in, text) = text.split_once(' ')?;
    let (pending, total) = text.split_once(' ').filter(|_| written_in == boot)?;
    Some(ReservationTotals { pending: Bytes(pending.parse().ok()?), total: parse_total(total) })
}

fn parse_total(text: &str) -> Option<Reserved> {
    let bound = text.strip_prefix(UPPER_BOUND);
    let numbers = bound.unwrap_or(text).split(' ').map(|number| number.parse().ok());
    let [volumes, inodes, overhead] = numbers.collect::<Option<Vec<u64>>>()?.try_into().ok()?;
    Some(Reserved {
        volumes: Bytes(volumes),
        inodes: Inodes(inodes),
        overhead: Bytes(overhead),
        exact: bound.is_none(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_live_total_sums_held_locks() {
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
    fn a_lock_rounds_up_to_units() {
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
    fn a_reservation_lasts_until_last_close() {
        let record = tempfile::NamedTempFile::new().unwrap();
        let copy = PendingLock::new(record.as_file(), Bytes(UNIT)).unwrap();
        // As a child process inherits it: one more descriptor of the same description.
        let inherited = copy._lock.try_clone().unwrap();
        drop(copy);
        assert_eq!(live_total(record.as_file()).unwrap(), Bytes(UNIT));
        drop(inherited);
        assert_eq!(live_total(record.as_file()).unwrap(), Bytes(0));
    }

    #[test]
    fn totals_of_earlier_boots_are_ignored() {
        let (earlier, now) = (Boot("earlier".to_owned()), Boot::current().unwrap());
        let totals = ReservationTotals { pending: Bytes(3), total: None };
        assert_eq!(parse(&print(totals, &earlier), &now), None);
        assert_eq!(parse(&print(totals, &now), &now), Some(totals));
    }

    proptest! {
        #[test]
        fn totals_read_back_as_printed(
            pending in any::<u64>(),
            total in proptest::option::of((any::<u64>(), any::<u64>(), any::<u64>(), any::<bool>())),
        ) {
            let boot = Boot("b".to_owned());
            let total = total.map(|(volumes, inodes, overhead, exact)| Reserved {
                volumes: Bytes(volumes),
                inodes: Inodes(inodes),
                overhead: Bytes(overhead),
                exact,
            });
            let totals = ReservationTotals { pending: Bytes(pending), total };
            prop_assert_eq!(parse(&print(totals, &boot), &boot), Some(totals));
        }

        #[test]
        fn parsing_any_text_does_not_panic(text in "(b )?[0-9~\\- \\n]{0,80}|\\PC{0,60}") {
            parse(&text, &Boot("b".to_owned()));
        }
    }
}
