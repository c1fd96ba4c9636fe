//! The account of what is promised, one for all processes that use the store.
//!
//! It is an extended attribute of a file, read and written under the file's lock: it takes no blocks, which would have
//! to be in it. It is never made durable, and so counts for the boot it was written in only; where there is none that
//! counts, what is promised is counted from the volumes. So it is after a process died that was making one.

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

/// Stands where a number would, while that is to be counted.
const UNKNOWN: &str = "-";
/// Stands before a number that is an upper bound. An earlier version takes it for [`UNKNOWN`], and counts.
const UPPER_BOUND: &str = "~";

/// What is promised, and what can be promised to nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reserved {
    /// To volumes, deleted ones in the trash among them.
    pub(super) volumes: Bytes,
    /// In use by no volume: metadata, and files that are not the store's.
    pub(super) overhead: Bytes,
    /// `false` if the sum of both is only an upper bound, which a later count can lower.
    pub(super) exact: bool,
}

impl Reserved {
    pub(super) fn sum(&self) -> Bytes {
        self.volumes.saturating_add(self.overhead)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReservationTotals {
    /// Reserved to what is being made now, and so perhaps in no volume to count. In whole units, as they are held.
    pub(super) pending: Bytes,
    /// All that is promised, pending or not. None where it is to be counted.
    pub(super) total: Option<Reserved>,
}

impl ReservationTotals {
    /// The same account with a total that the next question for the space counts again.
    pub(super) fn upper_bound(self) -> Self {
        Self { total: self.total.map(|total| Reserved { exact: false, ..total }), ..self }
    }

    /// Takes back what was promised to a volume that is gone.
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

/// The account, locked while this lives. Whoever holds it waits for project ids at most.
#[derive(Debug)]
pub(super) struct ReservationRecord<'a> {
    file: Flock<OwnedFd>,
    boot: &'a Boot,
}

impl<'a> ReservationRecord<'a> {
    /// What is promised, as it is while nobody else changes it.
    pub(super) fn lock(layout: &'a Layout) -> Result<Self> {
        // A store of an earlier version has none.
        let file = layout::open_file(&layout.private, "promised", OFlag::O_RDWR | OFlag::O_CREAT)?;
        let file = flock::exclusive(file, layout.lock_timeout, "account for space, which takes the lock")?;
        Ok(Self { file, boot: &layout.boot })
    }

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
        // Somebody died, and only the volumes can tell whether before or after making one.
        Ok(ReservationTotals { pending: live, total: None })
    }

    /// Holds bytes for what is being made, as long as its maker lives. The account must be written then.
    pub(super) fn hold(&self, bytes: Bytes) -> Result<PendingLock> {
        PendingLock::new(&*self.file, bytes)
    }

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

/// None for what was not written in this boot.
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

/// A number, and whether it is exact.
fn parse_total(field: &str) -> Option<(Bytes, bool)> {
    let bound = field.strip_prefix(UPPER_BOUND);
    Some((Bytes(bound.unwrap_or(field).parse().ok()?), bound.is_none()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_earlier_boot_has_written_nothing() {
        let (earlier, now) = (Boot("earlier".to_owned()), Boot::current().unwrap());
        let totals = ReservationTotals { pending: Bytes(3), total: None };
        assert_eq!(parse(&print(totals, &earlier), &now), None);
        assert_eq!(parse(&print(totals, &now), &now), Some(totals));
    }

    proptest! {
        #[test]
        fn an_account_reads_back_as_printed(
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
        fn any_text_is_read(text in "(b )?[0-9~\\- \\n]{0,80}|\\PC{0,60}") {
            parse(&text, &Boot("b".to_owned()));
        }
    }
}
