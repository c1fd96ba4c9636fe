//! The one place that changes the total of all reservations.
//!
//! A method that releases a reservation removes a limit or a name while the record is locked.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::record::{PendingLock, ReservationRecord, ReservationTotals, Reserved};
use super::reservation::{FilesystemInodes, Reservation, Space};
use crate::error::{ErrorKind, Result};
use crate::project_quota::{ProjectId, ProjectIds, Release};
use crate::units::Bytes;
use crate::volume_store::on_disk::{DataFilesystem, Layout, assigned_ids};
use crate::volume_store::source::ContentSource;

/// How long all changes of the store may wait for a retry of deferred releases. Most operations hold their lock for milliseconds.
const RETRY_LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Space reserved for an image that is being created or expanded. Drop it once the image has its name or its new size: from
/// then on a count finds the space in the image itself.
#[must_use = "if it is dropped before the image exists, a count does not find the reserved bytes"]
pub(crate) struct PendingReservation<'a> {
    book: SpaceBook<'a>,
    pending: Option<PendingLock>,
    /// To release when this is dropped, because the image did not get it.
    unused: Reservation,
    reservation: Reservation,
}

impl PendingReservation<'_> {
    /// Releases the reservation, because the image did not get it.
    pub(crate) fn release(mut self) {
        self.unused = self.reservation;
    }
}

impl Drop for PendingReservation<'_> {
    fn drop(&mut self) {
        let pending = self.pending.take();
        self.book.adjust(|totals| {
            totals.release(self.unused);
            totals.pending = totals.pending.saturating_sub(pending.as_ref().map_or(Bytes(0), |p| p.bytes));
            // While the record is locked: otherwise another process would conclude that this process has died.
            drop(pending);
        });
    }
}

/// The locked record, and the totals with a further reservation, which are not written yet.
struct Raised<'a> {
    record: ReservationRecord<'a>,
    pending: Bytes,
    total: Reserved,
}

/// The reservations of a store. It is a view of the store, and each change of the total is one of its methods.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpaceBook<'s> {
    pub(crate) layout: &'s Layout,
    pub(crate) filesystem: &'s DataFilesystem,
    pub(crate) ids: &'s ProjectIds,
    /// Project ids of the store.
    pub(crate) range: &'s RangeInclusive<ProjectId>,
}

impl<'s> SpaceBook<'s> {
    /// As [`VolumeStore::space`](crate::volume_store::VolumeStore::space).
    pub(crate) fn space(&self) -> Result<Space> {
        let mut frees_finished = false;
        loop {
            let record = match ReservationRecord::lock(self.layout) {
                Ok(record) => record,
                // A read-only file system takes no reservations, and no process changes those that it has.
                Err(error) if error.kind() == ErrorKind::ReadOnly => return self.space_with(self.count()?),
                Err(error) => return Err(error),
            };
            let totals = record.read()?;
            match totals.total {
                // A count would include the images that are being created twice, and be an upper bound too.
                Some(total) if total.exact || totals.pending > Bytes(0) => return self.space_with(total),
                _ if frees_finished => {
                    return self.space_with(self.count_into(&record, totals, frees_finished)?);
                }
                _ => {}
            }
            // Without the lock, because this may take long.
            drop(record);
            self.finish_all_inactivation()?;
            frees_finished = true;
        }
    }

    /// Reserves space for an image. The returned value holds it until the image has it, and is dropped then.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] says how much was requested and how much is available.
    pub(crate) fn reserve(
        &self,
        entry: ContentSource<'_>,
        reservation: Reservation,
        operation: &'static str,
    ) -> Result<PendingReservation<'s>> {
        let Raised { record, pending, total } = self.raise(entry, operation, || Ok(reservation))?;
        let held = PendingLock::new(&*record.file, reservation.bytes)?;
        record
            .write(ReservationTotals { pending: pending.saturating_add(held.bytes), total: Some(total) })?;
        Ok(PendingReservation {
            book: *self,
            pending: Some(held),
            unused: Reservation::default(),
            reservation,
        })
    }

    /// Reserves what `more` returns, and calls `set` to write it into a quota record. Both happen while the record of the
    /// total is locked, so a concurrent call sees neither or both, and a count finds the reservation once.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve), and those of `more` and `set`. After an error of `set` the next call counts the total again.
    pub(crate) fn reserve_limit<T>(
        &self,
        entry: ContentSource<'_>,
        operation: &'static str,
        more: impl Fn() -> Result<Reservation>,
        set: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Raised { record, pending, total } = self.raise(entry, operation, more)?;
        let totals = ReservationTotals { pending, total: Some(total) };
        // The process may die before the limit is set.
        record.write(totals.upper_bound())?;
        let done = set()?;
        // If this fails, the next call counts the total again.
        record.write(totals).ok();
        Ok(done)
    }

    /// Locks the record, checks that what `more` returns is available beside the total, and adds it.
    fn raise(
        &self,
        entry: ContentSource<'_>,
        operation: &'static str,
        more: impl Fn() -> Result<Reservation>,
    ) -> Result<Raised<'s>> {
        let mut frees_finished = false;
        loop {
            let record = ReservationRecord::lock(self.layout)?;
            let totals = record.read()?;
            let more = more()?;
            let mut total = match totals.total {
                Some(total) if !frees_finished => total,
                _ => self.count_into(&record, totals, frees_finished)?,
            };
            let space = self.space_with(total)?;
            if space.has(more) {
                total.add(more);
                return Ok(Raised { record, pending: totals.pending, total });
            }
            if frees_finished {
                return Err(space.lack_of(more, operation, entry));
            }
            // The total may be too high, and XFS frees the blocks of deleted files in the background. This call waits for that
            // without the lock, so other calls do not have to wait.
            drop(record);
            self.finish_all_inactivation()?;
            frees_finished = true;
        }
    }

    /// Removes the name of an image and releases its reservation; `None` if that has to be counted. `unlink` removes the name, and
    /// returns `false` if another process has done so.
    pub(crate) fn remove_image(
        &self,
        released: Option<Reservation>,
        unlink: impl FnOnce() -> Result<bool>,
    ) -> Result<bool> {
        self.change_total(|totals| {
            let removed = unlink()?;
            match released {
                _ if !removed => {}
                Some(reservation) => totals.release(reservation),
                None => totals.total = None,
            }
            Ok(removed)
        })
    }

    /// Calls `set`, which lowers limits by `surplus`, and releases that.
    pub(crate) fn lower_limit(&self, surplus: Reservation, set: impl FnOnce() -> Result<()>) -> Result<()> {
        self.change_total(|totals| {
            set()?;
            totals.release(surplus);
            Ok(())
        })
    }

    /// Prevents counts by other processes until the returned value is dropped. A count opens each image for a moment.
    pub(crate) fn lock_out_counts(&self) -> Result<impl Sized + use<'s>> {
        ReservationRecord::lock(self.layout)
    }

    /// Frees the project id of a removed directory and releases the reservation of its limit. While the directory is still
    /// open or mounted somewhere, its inode is charged to the id, and the id keeps its limit. The release is then deferred:
    /// the next emptying of the trash tries again, or recovery finds the id. A process that had the directory open while it
    /// emptied the trash tries again itself, after it has closed the directory.
    ///
    /// Other processes may free the same id concurrently. Only the process that removes the limit releases the reservation,
    /// and it does so while the record is locked.
    pub(crate) fn release_project(&self, project: ProjectId) -> Result<Release> {
        // Before the record is locked. Otherwise all creations would wait for the files that any tenant has deleted.
        let finished = self.filesystem.quota().finish_inactivation(project);
        let released = self.change_total(|totals| {
            self.ids.release_finished(project, finished, |usage| totals.release_limit(usage))
        });
        // Also if the record could not be locked. Of a copy that was discarded, nothing else would find the id before recovery.
        released.inspect_err(|_| self.ids.defer_release(project))
    }

    /// Tries again to free the project ids whose release was deferred. The exclusive lock prevents other processes from creating
    /// volumes in the meantime. If a directory has such an id, another process has freed and allocated the id again, and it is left
    /// alone. While the clone of a large image holds the lock, the ids stay deferred: no other call waits for that clone.
    pub(crate) fn retry_deferred_releases(&self) -> Result<()> {
        if self.ids.draining().is_empty() {
            return Ok(());
        }
        // Before anything is locked, as above. Files that are closed later are left to the next emptying of the trash.
        self.finish_all_inactivation()?;
        let _lock = match self.layout.lock_exclusive(RETRY_LOCK_TIMEOUT) {
            Err(error) if error.kind() == ErrorKind::Busy => return Ok(()),
            locked => locked?,
        };
        let assigned = assigned_ids(self.layout)?;
        self.change_total(|totals| {
            self.ids.retry_finished(&assigned, |usage| totals.release_limit(usage)).map(drop)
        })
    }

    /// Lowers the limits of a deleted volume, whose directory is empty, to the usage that is still charged to it, and releases
    /// the rest of its reservation. Files of other volumes, files that cannot be removed, and deleted files that are open still
    /// use space. No volume can use the rest any more.
    pub(crate) fn limit_to_usage(&self, project: ProjectId) -> Result<()> {
        self.change_total(|totals| {
            let quota = self.filesystem.quota();
            let Some(usage) = quota.usage(project)? else { return Ok(()) };
            let Some(limits) = Reservation::of_project(&usage) else { return Ok(()) };
            let used = Reservation::of_usage(usage.bytes, usage.inodes);
            let lowered =
                Reservation { bytes: used.bytes.min(limits.bytes), inodes: used.inodes.min(limits.inodes) };
            if lowered != limits {
                quota.set_limits(project, lowered.limits())?;
                totals.release(limits.saturating_sub(lowered));
            }
            Ok(())
        })
    }

    /// Discards the total, because it is no longer correct. The next call counts it again.
    pub(crate) fn invalidate_total(&self) {
        self.adjust(|totals| totals.total = None);
    }

    /// Changes the totals. If the record cannot be written, it stays too high, and is counted again before a call fails for
    /// lack of space.
    fn adjust(&self, change: impl FnOnce(&mut ReservationTotals)) {
        let adjusted = ReservationRecord::lock(self.layout).and_then(|record| {
            let mut totals = record.read()?;
            change(&mut totals);
            record.write(totals)
        });
        adjusted.ok();
    }

    /// Calls `change` with the totals while their record is locked. `change` removes a limit or a name and releases its
    /// reservation, so a count finds both or neither. After an error, or if the process dies in between, the next call counts
    /// the total again.
    fn change_total<T>(&self, change: impl FnOnce(&mut ReservationTotals) -> Result<T>) -> Result<T> {
        let record = ReservationRecord::lock(self.layout)?;
        let mut totals = record.read()?;
        if totals.total.is_some_and(|total| total.exact) {
            record.write(totals.upper_bound())?;
        }
        let outcome = change(&mut totals);
        let written = if outcome.is_ok() { totals } else { totals.upper_bound() };
        // If this fails, the next call counts the total again.
        record.write(written).ok();
        outcome
    }

    /// Counts the total and records it. The count is exact if no image was created or expanded in the meantime and no blocks
    /// wait to be freed. Otherwise it includes some of them twice; if a lower total is already recorded, that one stays.
    fn count_into(
        &self,
        record: &ReservationRecord<'_>,
        totals: ReservationTotals,
        frees_finished: bool,
    ) -> Result<Reserved> {
        let mut counted = self.count()?;
        counted.volumes = counted.volumes.saturating_add(totals.pending);
        counted.exact = frees_finished && totals.pending == Bytes(0);
        let known = totals.total.filter(|known| !counted.exact && known.is_within(&counted));
        let total = known.unwrap_or(counted);
        record.write(ReservationTotals { total: Some(total), ..totals })?;
        Ok(total)
    }

    /// Returns the space of the file system, given the total of all reservations.
    fn space_with(&self, reserved: Reserved) -> Result<Space> {
        let (total, free) = self.blocks()?;
        let inodes = FilesystemInodes::read(self.filesystem)?;
        let unreserved = total
            .saturating_sub(reserved.volumes)
            .saturating_sub(reserved.overhead)
            .saturating_sub(inodes.reservation(reserved.inodes));
        Ok(Space {
            total,
            available: unreserved.min(free),
            reserved: reserved.volumes,
            inodes: inodes.further(reserved.inodes),
        })
    }

    /// Waits until the blocks of deleted files are free. XFS completes the deferred inode inactivation of the whole file
    /// system, whichever project the call names. Only the post-EOF blocks that it frees are those of the project.
    pub(crate) fn finish_all_inactivation(&self) -> Result<()> {
        self.filesystem.quota().finish_inactivation(*self.range.start())
    }
}
