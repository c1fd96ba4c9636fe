//! What is reserved for volumes and what is free beside it: the one place that changes the total.
//!
//! A directory's limit is a reservation although nothing is allocated for it, so free blocks alone
//! would let the store overcommit. So it is with a thin image, and with a clone: its blocks are the source's until one of
//! the two is written, and then there must be others.
//!
//! **Where a reservation is.** Each one is on disk, in the object that it is for, and no process has to remember it:
//!
//! | reservation | begins | ends |
//! |---|---|---|
//! | of a directory: the hard limit in the quota record of its project id | when the limit is set | when the limit is removed, which is after the directory is gone and nothing is charged to the id |
//! | of an image: the capacity that is recorded on it, and what its extent tree may take | when it gets its name, or is grown | when its name is removed from the trash, which is after no process or loop device has it open, and after its blocks are free |
//! | pending: for an image that a live process creates or grows ([`Promise`]) | before the first block is allocated | when the image has its name or size, or has neither |
//!
//! **The total** of all of them is kept in the account (`ledger`). It changes only with the account locked, and in the same
//! section as the reservation: the call that removes a limit or a name releases what that reserved, and a call that
//! finds it removed releases nothing. So any number of processes can empty, recover and grow concurrently, and none
//! releases a reservation twice.
//!
//! **The total is an upper bound.** It is raised before a reservation begins and lowered after one has ended, so a crash
//! leaves it too high. Before such a section it is marked as inexact, so what the crash left is counted again by the
//! next call that asks for the space, and by each call that would be refused. A count is inexact itself while images are
//! pending, for it finds their blocks too, and before the file system has freed the blocks of what was deleted.

use nix::sys::statvfs::fstatvfs;

use super::image_space::ImageSpace;
use super::ledger::{Account, Ledger, Promised};
use super::pending::Pending;
use super::sharing::SharedBlocks;
use super::{ContentSource, VolumeStore, layout};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::units::Bytes;

/// Room on the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Its size.
    pub total: Bytes,
    /// Bytes that are neither reserved for a volume, whether used or not, nor taken by the file system's own
    /// structures. [`largest_volume`](Self::largest_volume) returns the capacity of a volume that fits into them.
    pub available: Bytes,
    /// What is promised to volumes, whether used or not; deleted ones are among them until their space is free.
    pub promised: Bytes,
}

/// A pending reservation: bytes for an image that is being created or grown. Drop it once they are the image's, which a
/// count finds.
#[must_use = "dropped before the image is there, its bytes are reserved for nothing that a count finds"]
pub(super) struct Promise<'a> {
    store: &'a VolumeStore,
    pending: Option<Pending>,
    /// Released when this is dropped, because the image did not get them.
    unused: Bytes,
    bytes: Bytes,
}

impl Promise<'_> {
    /// Releases the bytes, because the image did not get them.
    pub(super) fn withdraw(mut self) {
        self.unused = self.bytes;
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        let pending = self.pending.take();
        self.store.adjust(|account| {
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

impl VolumeStore {
    /// Room on the file system for new volumes. While images are being created or grown, `available` may be too small by
    /// what they get. Afterwards it is exact again, but for what the file system has taken for itself since the last
    /// count.
    ///
    /// Counts where it has to, which takes as long as there are volumes, and then waits for the blocks that the file system
    /// frees in the background.
    ///
    /// # Errors
    /// Those of statfs(2) and quotactl_fd(2).
    pub fn space(&self) -> Result<Space> {
        let mut frees_finished = false;
        loop {
            let ledger = match self.layout.ledger() {
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
    pub(super) fn promise(
        &self,
        entry: ContentSource<'_>,
        bytes: Bytes,
        operation: &'static str,
    ) -> Result<Promise<'_>> {
        let Room { ledger, pending, mut total, .. } = self.require_room(entry, operation, || Ok(bytes))?;
        let held = ledger.hold(bytes)?;
        total.volumes = total.volumes.saturating_add(bytes);
        ledger.write(Account { pending: pending.saturating_add(held.bytes), promised: Some(total) })?;
        Ok(Promise { store: self, pending: Some(held), unused: Bytes(0), bytes })
    }

    /// Reserves the bytes that `more` returns, and has `set` write them into a quota record. Both happen with the account
    /// locked, so that a concurrent call sees neither or both, and a count finds the reservation once.
    ///
    /// # Errors
    /// As [`promise`](Self::promise), and those of `more` and `set`. After an error of `set` the total is counted again.
    pub(super) fn reserve_limit<T>(
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
    ) -> Result<Room<'_>> {
        let mut frees_finished = false;
        loop {
            let ledger = self.layout.ledger()?;
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
    pub(super) fn count_anew(&self) {
        self.adjust(|account| account.promised = None);
    }

    /// An account that could not be written is too high, and is counted again before anything is refused.
    fn adjust(&self, change: impl FnOnce(&mut Account)) {
        let adjusted = self.layout.ledger().and_then(|ledger| {
            let mut account = ledger.read()?;
            change(&mut account);
            ledger.write(account)
        });
        adjusted.ok();
    }

    /// Releases a reservation, and what it was for, with the account locked: a count finds both or neither. After an
    /// error, or if the process dies in between, the total is counted again.
    pub(super) fn with_account<T>(&self, change: impl FnOnce(&mut Account) -> Result<T>) -> Result<T> {
        let ledger = self.layout.ledger()?;
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
    pub(super) fn finish_all_frees(&self) -> Result<()> {
        self.filesystem.quota().finish_frees(*self.options.project_ids.start())
    }

    pub(super) fn blocks(&self) -> Result<(Bytes, Bytes)> {
        let status = fstatvfs(&self.filesystem.root).context("statfs", self.filesystem.path.display())?;
        let unit = status.fragment_size();
        Ok((Bytes(status.blocks() * unit), Bytes(status.blocks_available() * unit)))
    }

    fn count(&self) -> Result<Promised> {
        let (mut volumes, mut in_use) = (Bytes(0), Bytes(0));
        for usage in self.filesystem.quota().ids(self.options.project_ids.clone()) {
            let usage = usage?;
            // Over its limit, a volume takes more than it was promised.
            volumes = volumes.saturating_add(usage.limits.bytes.hard.unwrap_or_default().max(usage.bytes));
            in_use = in_use.saturating_add(usage.bytes);
        }
        let mut shared = SharedBlocks::default();
        for directory in self.layout.shelves() {
            for name in layout::names(directory, "volumes, snapshots and trash")? {
                if let Some(image) = ImageSpace::count(directory, &name, &mut shared)? {
                    volumes = volumes.saturating_add(image.promised);
                    in_use = in_use.saturating_add(image.alone);
                }
            }
        }
        in_use = in_use.saturating_add(shared.once());
        let (total, free) = self.blocks()?;
        let overhead = total.saturating_sub(free).saturating_sub(in_use).max(self.least_overhead(total)?);
        Ok(Promised { volumes, overhead, exact: true })
    }
}
