//! Releasing reservations: together with what they were for, with the account locked.

use super::book::SpaceBook;
use super::image_space::Released;
use super::record::ReservationRecord;
use crate::error::Result;
use crate::project_quota::{Limits, ProjectId};
use crate::units::{Bytes, Inodes};
use crate::volume_store::on_disk::assigned_ids;

/// A limit of 0 bytes would be none.
const LEAST_LIMIT: Bytes = Bytes(4096);

impl<'s> SpaceBook<'s> {
    /// Removes the name of an image and releases what it reserved. `unlink` removes it, and returns whether it did.
    pub(crate) fn remove_image(
        &self,
        released: Released,
        unlink: impl FnOnce() -> Result<bool>,
    ) -> Result<bool> {
        self.change_total(|totals| {
            let removed = unlink()?;
            match released {
                _ if !removed => {}
                Released::Bytes(bytes) => totals.release(bytes),
                Released::Unknown => totals.total = None,
            }
            Ok(removed)
        })
    }

    /// Lowers a limit, which `set` does, and releases the bytes that it reserved before and reserves no more.
    pub(crate) fn lower_limit(&self, surplus: Bytes, set: impl FnOnce() -> Result<()>) -> Result<()> {
        self.change_total(|totals| {
            set()?;
            totals.release(surplus);
            Ok(())
        })
    }

    /// Keeps other processes from counting, which opens each image for a moment, while the returned value lives.
    pub(crate) fn lock_out_counts(&self) -> Result<impl Sized + use<'s>> {
        ReservationRecord::lock(self.layout)
    }

    /// Frees the id of a removed directory, and releases what its limit reserved. While the directory is still open or
    /// mounted somewhere its inode is charged to the id, which then keeps its limit. The next emptying tries again, or
    /// recovery finds the id.
    ///
    /// Other processes may free the same id concurrently. Only the one that removes the limit releases the reservation,
    /// and it does so with the account locked.
    pub(crate) fn release_project(&self, project: ProjectId) -> Result<()> {
        // Before the account is locked. Otherwise all creations would wait for the files that any tenant has deleted.
        let finished = self.filesystem.quota().finish_frees(project);
        self.change_total(|totals| {
            self.ids.release_finished(project, finished, |usage| totals.release_limit(usage)).map(drop)
        })
    }

    /// Tries again to free ids that were draining. The exclusive lock keeps other processes from creating volumes in the
    /// meantime. An id that a directory carries was freed and allocated again by another process, and is left alone.
    pub(crate) fn retry_deferred_releases(&self) -> Result<()> {
        if self.ids.draining().is_empty() {
            return Ok(());
        }
        // Before anything is locked, as above. Files that are closed after this are left to the next emptying.
        self.finish_all_frees()?;
        let _lock = self.layout.lock_exclusive()?;
        let assigned = assigned_ids(self.layout)?;
        self.change_total(|totals| {
            self.ids.retry_finished(&assigned, |usage| totals.release_limit(usage)).map(drop)
        })
    }

    /// Lowers the limits of a deleted volume whose directory is empty to what is still charged to it, and releases the rest
    /// of its reservation. What is charged really takes space: files of other volumes, files that cannot be removed, or
    /// deleted files that are open. No volume can use the rest any more.
    pub(crate) fn limit_to_usage(&self, project: ProjectId) -> Result<()> {
        self.change_total(|totals| {
            let quota = self.filesystem.quota();
            let Some(usage) = quota.usage(project)? else { return Ok(()) };
            let Some(limit) = usage.limits.bytes.hard else { return Ok(()) };
            let lowered = usage.bytes.max(LEAST_LIMIT).min(limit);
            if lowered < limit {
                quota.set_limits(project, Limits::hard(lowered, usage.inodes.max(Inodes(1))))?;
                totals.release(limit.saturating_sub(lowered));
            }
            Ok(())
        })
    }
}
