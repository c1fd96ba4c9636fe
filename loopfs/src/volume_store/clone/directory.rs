//! Copies of directories, file by file.

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::Flock;

use super::target::{CopyTarget, Original};
use crate::error::{Error, ErrorKind, Explanation, Result};
use crate::project_quota::Usage;
use crate::project_tree::{SkipReason, try_clone_tree};
use crate::units::{Bytes, Inodes};
use crate::volume_store::space::{Reservation, reservation_of_directory};
use crate::volume_store::staging::Staged;
use crate::volume_store::store::VolumeStore;

impl VolumeStore {
    /// Copies a directory. Releases the shared lock while files are copied, because that takes time proportional to their number
    /// and recovery must not wait for it.
    pub(super) fn copy_directory(
        &self,
        lock: Flock<OwnedFd>,
        original: &Original<'_>,
        target: CopyTarget<'_>,
        is_wanted: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let of_source = original.content.attributes()?;
        let usage = original.content.usage(of_source)?;
        let from = original.content.open_dir()?;
        let limits = limits_while_copied(original, &usage, target)?;
        let spec = match target {
            CopyTarget::Volume { spec, .. } => spec.directory,
            CopyTarget::Snapshot { .. } => of_source.spec,
        };
        let staged = self.stage(target.entry(), target.operation(), limits, spec)?;
        drop(lock);
        let copied = copy_tree(&from, &staged, target, is_wanted);
        // Also held for the removal after an error, because recovery could free the project concurrently.
        let _lock = self.layout.lock_shared()?;
        if let Err(error) = copied {
            return Err(staged.discard(error));
        }
        self.complete(staged, &from, original, target)
    }

    /// Gives the copy its final limits and its name. The caller holds the shared lock.
    fn complete(
        &self,
        mut staged: Staged<'_>,
        from: &OwnedFd,
        original: &Original<'_>,
        target: CopyTarget<'_>,
    ) -> Result<()> {
        // The contents of a deleted source are removed in the meantime, so its copy may be incomplete.
        let completed = self
            .require_undeleted(from, original.entry, "copy")
            .and_then(|()| target.record(&staged, original.entry, original.capacity))
            // Last, because the limit of a snapshot is its usage.
            .and_then(|()| set_final_limits(&mut staged, target));
        match completed {
            Ok(()) => staged.publish(),
            Err(error) => Err(staged.discard(error)),
        }
    }
}

/// Returns the limits during the copy. Metadata has another layout in a copy, so the copy of a full volume may use a little more
/// than the requested size. Only such a copy uses the surplus. The source may also get files in the meantime.
fn limits_while_copied(
    original: &Original<'_>,
    usage: &Usage,
    target: CopyTarget<'_>,
) -> Result<Reservation> {
    let margin = Bytes(usage.bytes.0 / 16).saturating_add(Bytes(4 << 20));
    let copied = Inodes(usage.inodes.0.saturating_add(usage.inodes.0 / 16).saturating_add(1024));
    match target {
        CopyTarget::Volume { capacity, spec, id } => {
            target.require_capacity_for(original.entry, original.capacity)?;
            let Reservation { bytes, inodes } = reservation_of_directory(capacity, spec.directory);
            if inodes < usage.inodes {
                let cause = format!(
                    "{} has {} inodes, and {capacity} with one for each {} bytes have {}",
                    original.entry, usage.inodes.0, spec.directory.bytes_per_inode, inodes.0
                );
                return Err(Error::new(ErrorKind::WouldShrink, "clone volume", id, cause)
                    .with_remedy("request more, or a smaller bytesPerInode"));
            }
            Ok(Reservation { bytes: bytes.saturating_add(margin), inodes: inodes.max(copied) })
        }
        CopyTarget::Snapshot { .. } => {
            let bytes = usage.bytes.saturating_add(margin).saturating_add(margin);
            Ok(Reservation { bytes, inodes: copied })
        }
    }
}

fn set_final_limits(staged: &mut Staged<'_>, target: CopyTarget<'_>) -> Result<()> {
    let limits = match target {
        CopyTarget::Volume { capacity, spec, .. } => reservation_of_directory(capacity, spec.directory),
        // A snapshot does not grow.
        CopyTarget::Snapshot { .. } => {
            let used = staged.usage()?.map(|usage| (usage.bytes, usage.inodes)).unwrap_or_default();
            Reservation::of_usage(used.0, used.1)
        }
    };
    staged.set_final_limits(limits)
}

fn copy_tree(
    from: &OwnedFd,
    staged: &Staged<'_>,
    target: CopyTarget<'_>,
    is_wanted: &mut dyn FnMut() -> bool,
) -> Result<()> {
    let report = try_clone_tree(from.as_fd(), staged.as_fd(), |_| match is_wanted() {
        true => Ok(()),
        false => {
            let detail = "the caller ended the copy; nothing is left of it";
            Err(Error::new(ErrorKind::Other, target.operation(), target.entry(), detail))
        }
    })?;
    if report.is_complete() {
        return Ok(());
    }
    let skipped = &report.skipped;
    let (kind, explanation) = if skipped.is_empty() {
        let moved = Explanation::of(
            "directories in its source were moved while it was copied",
            "try again, or stop the program that moves them",
        );
        (ErrorKind::Busy, moved)
    } else {
        let first = skipped.examples.first().map(|example| match example.reason {
            SkipReason::Refused(errno) => {
                format!(", {:?} first: {}", example.path, Errno::from_raw(errno))
            }
            reason => format!(", {:?} first: {reason:?}", example.path),
        });
        let detail = format!(
            "{} files or directories and {} mounts in its source could not be copied{}",
            skipped.refused,
            skipped.mounts,
            first.unwrap_or_default()
        );
        (ErrorKind::Other, detail.into())
    };
    Err(Error::new(kind, target.operation(), target.entry(), explanation))
}
