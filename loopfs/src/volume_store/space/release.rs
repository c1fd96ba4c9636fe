//! Releasing reservations: each method removes a limit or a name and releases its reservation, while the record is locked.

use super::book::SpaceBook;
use super::image_space::Released;
use super::record::ReservationRecord;
use super::reservation::Reservation;
use crate::error::Result;
use crate::project_quota::{Limits, ProjectId, Release};
use crate::units::{Bytes, Inodes};
use crate::volume_store::on_disk::assigned_ids;

/// The least limit, because a limit of 0 bytes would be no limit.
const LEAST_LIMIT: Bytes = Bytes(4096);

impl<'s> SpaceBook<'s> {
    /// Removes the name of an image and releases its reservation. `unlink` removes the name, and returns `false` if another
    /// process has done so.
    pub(crate) fn remove_image(
        &self,
        released: Released,
        unlink: impl FnOnce() -> Result<bool>,
    ) -> Result<bool> {
        self.change_total(|totals| {
            let removed = unlink()?;
            match released {
                _ if !removed => {}
                Released::Known(reservation) => totals.release(reservation),
                Released::Unknown => totals.total = None,
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
        self.change_total(|totals| {
            self.ids.release_finished(project, finished, |usage| totals.release_limit(usage))
        })
    }

    /// Tries again to free the project ids whose release was deferred. The exclusive lock prevents other processes from creating
    /// volumes in the meantime. If a directory has such an id, another process has freed and allocated the id again, and it is left
    /// alone.
    pub(crate) fn retry_deferred_releases(&self) -> Result<()> {
        if self.ids.draining().is_empty() {
            return Ok(());
        }
        // Before anything is locked, as above. Files that are closed later are left to the next emptying of the trash.
        self.finish_all_inactivation()?;
        let _lock = self.layout.lock_exclusive()?;
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
            let (Some(bytes), Some(inodes)) = (usage.limits.bytes.hard, usage.limits.inodes.hard) else {
                return Ok(());
            };
            let limits = Reservation { bytes, inodes };
            let lowered = Reservation {
                bytes: usage.bytes.max(LEAST_LIMIT).min(bytes),
                inodes: usage.inodes.max(Inodes(1)).min(inodes),
            };
            if lowered != limits {
                quota.set_limits(project, Limits::hard(lowered.bytes, lowered.inodes))?;
                totals.release(limits.saturating_sub(lowered));
            }
            Ok(())
        })
    }
}
