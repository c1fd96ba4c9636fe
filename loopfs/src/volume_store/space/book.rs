//! The book of reservations: the one place that changes the total.

use std::ops::RangeInclusive;

use super::ledger::{Account, Ledger, Promised};
use super::pending::Pending;
use super::reservation::Space;
use crate::error::{Error, ErrorKind, Result};
use crate::project_quota::{ProjectId, ProjectIds};
use crate::units::Bytes;
use crate::volume_store::on_disk::{DataFilesystem, Layout};
use crate::volume_store::source::ContentSource;

/// A pending reservation: bytes for an image that is being created or grown. Drop it once they are the image's, which a
/// count finds.
#[must_use = "dropped before the image is there, its bytes are reserved for nothing that a count finds"]
pub(crate) struct Promise<'a> {
    book: SpaceBook<'a>,
    pending: Option<Pending>,
    /// Released when this is dropped, because the image did not get them.
    unused: Bytes,
    bytes: Bytes,
}

impl Promise<'_> {
    /// Releases the bytes, because the image did not get them.
    pub(crate) fn withdraw(mut self) {
        self.unused = self.bytes;
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        let pending = self.pending.take();
        self.book.adjust(|account| {
            account.withdraw(self.unused);
            account.pending = account.pending.saturating_sub(pending.as_ref().map_or(Bytes(0), |p| p.bytes));
            // Its lock goes with the account locked, or another process would take this one for dead.
            drop(pending);
        });
    }
}

/// The locked account, with a total beside which `bytes` are free.
struct Room<'a> {
    ledger: Ledger<'a>,
    pending: Bytes,
    total: Promised,
    bytes: Bytes,
}

/// The reservations of a store: what is reserved, and what is free beside it. All that changes the total is a method of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpaceBook<'s> {
    pub(crate) layout: &'s Layout,
    pub(crate) filesystem: &'s DataFilesystem,
    pub(crate) ids: &'s ProjectIds,
    /// The project ids of the store.
    pub(crate) range: &'s RangeInclusive<ProjectId>,
}

impl<'s> SpaceBook<'s> {
    /// As [`VolumeStore::space`](crate::VolumeStore::space).
    pub(crate) fn space(&self) -> Result<Space> {
        let mut frees_finished = false;
        loop {
            let ledger = match Ledger::lock(self.layout) {
                Ok(ledger) => ledger,
                // A read-only file system takes no reservations, and no process changes those that it has.
                Err(error) if error.kind() == ErrorKind::ReadOnly => return self.space_beside(self.count()?),
                Err(error) => return Err(error),
            };
            let account = ledger.read()?;
            match account.promised {
                // A count would include the images that are being created twice, and be an upper bound too.
                Some(total) if total.exact || account.pending > Bytes(0) => return self.space_beside(total),
                _ if frees_finished => {
                    return self.space_beside(self.count_into(&ledger, account, frees_finished)?);
                }
                _ => {}
            }
            // Without the account, for it may take long.
            drop(ledger);
            self.finish_all_frees()?;
            frees_finished = true;
        }
    }

    /// Reserves bytes for an image until the returned value is dropped; the image has them then.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] says how much was requested and how much is available.
    pub(crate) fn promise(
        &self,
        entry: ContentSource<'_>,
        bytes: Bytes,
        operation: &'static str,
    ) -> Result<Promise<'s>> {
        let Room { ledger, pending, mut total, .. } = self.require_room(entry, operation, || Ok(bytes))?;
        let held = ledger.hold(bytes)?;
        total.volumes = total.volumes.saturating_add(bytes);
        ledger.write(Account { pending: pending.saturating_add(held.bytes), promised: Some(total) })?;
        Ok(Promise { book: *self, pending: Some(held), unused: Bytes(0), bytes })
    }

    /// Reserves the bytes that `more` returns, and has `set` write them into a quota record. Both happen with the account
    /// locked, so that a concurrent call sees neither or both, and a count finds the reservation once.
    ///
    /// # Errors
    /// As [`promise`](Self::promise), and those of `more` and `set`. After an error of `set` the total is counted again.
    pub(crate) fn reserve_limit<T>(
        &self,
        entry: ContentSource<'_>,
        operation: &'static str,
        more: impl Fn() -> Result<Bytes>,
        set: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Room { ledger, pending, mut total, bytes } = self.require_room(entry, operation, more)?;
        total.volumes = total.volumes.saturating_add(bytes);
        let account = Account { pending, promised: Some(total) };
        // The process may die before the limit is set.
        ledger.write(account.upper_bound())?;
        let done = set()?;
        // Without this the total is counted again.
        ledger.write(account).ok();
        Ok(done)
    }

    fn require_room(
        &self,
        entry: ContentSource<'_>,
        operation: &'static str,
        bytes: impl Fn() -> Result<Bytes>,
    ) -> Result<Room<'s>> {
        let mut frees_finished = false;
        loop {
            let ledger = Ledger::lock(self.layout)?;
            let account = ledger.read()?;
            let bytes = bytes()?;
            let total = match account.promised {
                Some(total) if !frees_finished => total,
                _ => self.count_into(&ledger, account, frees_finished)?,
            };
            let space = self.space_beside(total)?;
            if bytes <= space.available {
                return Ok(Room { ledger, pending: account.pending, total, bytes });
            }
            if frees_finished {
                let detail = format!(
                    "{bytes} asked, {} available of {} that the file system has",
                    space.available, space.total
                );
                return Err(Error::new(ErrorKind::NoSpace, operation, entry, detail));
            }
            // The total may be too high, and XFS frees the blocks of deleted files in the background. This caller waits
            // for them without the lock, so other callers do not.
            drop(ledger);
            self.finish_all_frees()?;
            frees_finished = true;
        }
    }

    /// Forgets the count: what it says is no longer so.
    pub(crate) fn count_anew(&self) {
        self.adjust(|account| account.promised = None);
    }

    /// An account that could not be written is too high, and is counted again before anything is refused.
    fn adjust(&self, change: impl FnOnce(&mut Account)) {
        let adjusted = Ledger::lock(self.layout).and_then(|ledger| {
            let mut account = ledger.read()?;
            change(&mut account);
            ledger.write(account)
        });
        adjusted.ok();
    }

    /// Releases a reservation, and what it was for, with the account locked: a count finds both or neither. After an
    /// error, or if the process dies in between, the total is counted again.
    pub(super) fn with_account<T>(&self, change: impl FnOnce(&mut Account) -> Result<T>) -> Result<T> {
        let ledger = Ledger::lock(self.layout)?;
        let mut account = ledger.read()?;
        if account.promised.is_some_and(|total| total.exact) {
            ledger.write(account.upper_bound())?;
        }
        let outcome = change(&mut account);
        let written = if outcome.is_ok() { account } else { account.upper_bound() };
        // Without this the total is counted again.
        ledger.write(written).ok();
        outcome
    }

    /// Counts, and writes down what was counted. The count is exact if no image has been created or grown meanwhile, and no
    /// blocks wait to be freed. Otherwise it includes some of both twice. If a lower total is known, that is kept.
    fn count_into(&self, ledger: &Ledger<'_>, account: Account, frees_finished: bool) -> Result<Promised> {
        let mut counted = self.count()?;
        counted.volumes = counted.volumes.saturating_add(account.pending);
        counted.exact = frees_finished && account.pending == Bytes(0);
        let known = account.promised.filter(|known| !counted.exact && known.sum() <= counted.sum());
        let total = known.unwrap_or(counted);
        ledger.write(Account { promised: Some(total), ..account })?;
        Ok(total)
    }

    fn space_beside(&self, promised: Promised) -> Result<Space> {
        let (total, free) = self.blocks()?;
        let unpromised = total.saturating_sub(promised.volumes).saturating_sub(promised.overhead);
        Ok(Space { total, available: unpromised.min(free), promised: promised.volumes })
    }

    /// Waits until the blocks of what was deleted are free. XFS finishes the frees of the whole file system, whichever
    /// project it is asked for; only blocks past the end of files are those of the project.
    pub(crate) fn finish_all_frees(&self) -> Result<()> {
        self.filesystem.quota().finish_frees(*self.range.start())
    }
}
