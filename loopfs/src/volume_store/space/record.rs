//! The reservation record: the total of all reservations, shared by all processes that use the store.
//!
//! It is an extended attribute of a file, read and written under the lock of that file. It therefore takes no blocks, which
//! would have to be part of the total. It is never made durable and is valid only in the boot that wrote it. Without a valid
//! record the total is counted from the volumes, and so it is after a process died while it created a volume.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use nix::fcntl::{Flock, OFlag};

use super::pending::{self, PendingLock};
use crate::error::{Context, Result};
use crate::flock;
use crate::project_quota::Usage;
use crate::sys::xattr;
use crate::units::Bytes;
use crate::volume_store::on_disk::Boot;
use crate::volume_store::on_disk::layout::{self, Layout};

const FILE: &str = ".loopfs/promised";
const NAME: &CStr = c"trusted.loopfs.promised";

/// Written in place of a number that has yet to be counted.
const UNKNOWN: &str = "-";
/// Written before a number that is an upper bound. An earlier version reads it as [`UNKNOWN`], and counts.
const UPPER_BOUND: &str = "~";

/// The bytes that no further volume can reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reserved {
    /// Reserved for volumes, including deleted volumes in the trash.
    pub(super) volumes: Bytes,
    /// Used, but by no volume: metadata of the file system, and files that do not belong to the store.
    pub(super) overhead: Bytes,
    /// `false` if the sum of both is only an upper bound, which a later count can lower.
    pub(super) exact: bool,
}

impl Reserved {
    /// Returns the sum of both.
    pub(super) fn sum(&self) -> Bytes {
        self.volumes.saturating_add(self.overhead)
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
    pub(super) fn release(&mut self, bytes: Bytes) {
        if let Some(total) = &mut self.total {
            total.volumes = total.volumes.saturating_sub(bytes);
        }
    }

    /// Releases what the limit of a project reserved. The caller has removed that limit.
    pub(super) fn release_limit(&mut self, cleared: &Usage) {
        self.release(cleared.limits.bytes.hard.unwrap_or_default());
    }
}

/// The reservation record, locked until this is dropped. The holder waits for no other lock except that of the project ids.
#[derive(Debug)]
pub(super) struct ReservationRecord<'a> {
    file: Flock<OwnedFd>,
    boot: &'a Boot,
}

impl<'a> ReservationRecord<'a> {
    /// Locks the record, so that no other process changes it.
    pub(super) fn lock(layout: &'a Layout) -> Result<Self> {
        // A store of an earlier version has no such file.
        let file = layout::open_file(&layout.private, "promised", OFlag::O_RDWR | OFlag::O_CREAT)?;
        let file = flock::exclusive(file, layout.lock_timeout, "account for space, which takes the lock")?;
        Ok(Self { file, boot: &layout.boot })
    }

    /// Reads the totals of this boot. If a process died with a pending reservation, the total is unknown.
    pub(super) fn read(&self) -> Result<ReservationTotals> {
        let text = xattr::get(&*self.file, NAME).context("read", FILE)?.unwrap_or_default();
        let totals = parse(&String::from_utf8_lossy(&text), self.boot).unwrap_or_default();
        if totals.pending == Bytes(0) {
            return Ok(totals);
        }
        let live = pending::live_total(&*self.file)?;
        if live == totals.pending {
            return Ok(totals);
        }
        // A process has died. Only a count shows whether it died before or after it created the image.
        Ok(ReservationTotals { pending: live, total: None })
    }

    /// Holds bytes for an image until the returned value is dropped or the process dies. The caller then writes the totals.
    pub(super) fn hold(&self, bytes: Bytes) -> Result<PendingLock> {
        PendingLock::new(&*self.file, bytes)
    }

    /// Writes the totals.
    pub(super) fn write(&self, totals: ReservationTotals) -> Result<()> {
        xattr::set(&*self.file, NAME, print(totals, self.boot).as_bytes()).context("write", FILE)
    }
}

fn print(totals: ReservationTotals, Boot(boot): &Boot) -> String {
    let ReservationTotals { pending: Bytes(pending), total } = totals;
    let number = |of: fn(&Reserved) -> Bytes| {
        total.as_ref().map_or(UNKNOWN.to_owned(), |total| {
            format!("{}{}", if total.exact { "" } else { UPPER_BOUND }, of(total).0)
        })
    };
    let (volumes, overhead) = (number(|total| total.volumes), number(|total| total.overhead));
    format!("{boot} {pending} {volumes} {overhead}")
}

/// Returns `None` if the text was not written in this boot.
fn parse(text: &str, Boot(boot): &Boot) -> Option<ReservationTotals> {
    let fields: Vec<&str> = text.split(' ').collect();
    match fields.as_slice() {
        [written_in, pending, volumes, overhead] if written_in == boot => Some(ReservationTotals {
            pending: Bytes(pending.parse().ok()?),
            total: parse_total(volumes).zip(parse_total(overhead)).map(|(volumes, overhead)| Reserved {
                volumes: volumes.0,
                overhead: overhead.0,
                exact: volumes.1 && overhead.1,
            }),
        }),
        _ => None,
    }
}

/// Parses a number, and returns it with `true` if it is exact.
fn parse_total(field: &str) -> Option<(Bytes, bool)> {
    let bound = field.strip_prefix(UPPER_BOUND);
    Some((Bytes(bound.unwrap_or(field).parse().ok()?), bound.is_none()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn totals_of_an_earlier_boot_are_ignored() {
        let (earlier, now) = (Boot("earlier".to_owned()), Boot::current().unwrap());
        let totals = ReservationTotals { pending: Bytes(3), total: None };
        assert_eq!(parse(&print(totals, &earlier), &now), None);
        assert_eq!(parse(&print(totals, &now), &now), Some(totals));
    }

    proptest! {
        #[test]
        fn totals_read_back_as_printed(
            pending in any::<u64>(),
            total in proptest::option::of((any::<u64>(), any::<u64>(), any::<bool>())),
        ) {
            let boot = Boot("b".to_owned());
            let total = total
                .map(|(volumes, overhead, exact)| Reserved { volumes: Bytes(volumes), overhead: Bytes(overhead), exact });
            let totals = ReservationTotals { pending: Bytes(pending), total };
            prop_assert_eq!(parse(&print(totals, &boot), &boot), Some(totals));
        }

        #[test]
        fn parsing_any_text_does_not_panic(text in "(b )?[0-9~\\- \\n]{0,80}|\\PC{0,60}") {
            parse(&text, &Boot("b".to_owned()));
        }
    }
}
