//! Copies of images, in one system call.

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::stat::fstat;

use super::target::{CopyTarget, Original};
use crate::error::{Context, Error, Result};
use crate::loop_device::Access;
use crate::units::Bytes;
use crate::volume_store::expand::allocate;
use crate::volume_store::on_disk::{Image, mark_sharing, may_share};
use crate::volume_store::source::ContentSource;
use crate::volume_store::space::{reservation_to_copy, shares_blocks};
use crate::volume_store::spec::Provisioning;
use crate::volume_store::store::VolumeStore;
use crate::{flock, reflink};

impl VolumeStore {
    /// Copies an image. The caller holds the shared lock.
    pub(super) fn copy_image(&self, original: &Original<'_>, target: CopyTarget<'_>) -> Result<()> {
        let source = original.entry;
        let original = original.content.open_image(Access::ReadOnly)?;
        // One copy of a source at a time. The source must not be expanded between reading its size and the copy.
        let operation = "copy an image, which locks the source";
        let _lock_source = flock::exclusive_reopened(original.as_fd(), self.options.lock_timeout, operation)?;
        if self.exists_durably(|| self.has_copy(source, target))? {
            return Ok(());
        }
        let size = Bytes(fstat(&original).context("fstat", source)?.st_size as u64);
        target.require_capacity_for(source, size)?;
        let of_source = Image::read(&original)?;
        let settings = match target {
            CopyTarget::Volume { id, spec, .. } => of_source.resolve_clone(source, spec.image, id)?,
            // A snapshot has the settings of its source.
            CopyTarget::Snapshot { .. } => of_source.check_sharing(source).map(|()| of_source)?,
        };
        let source_has_margin = self.has_margin(&original, source, of_source.provisioning)?;
        let clone = match target {
            CopyTarget::Volume { capacity, .. } => Some(capacity),
            CopyTarget::Snapshot { .. } => None,
        };
        let reservation = reservation_to_copy(size, clone, source_has_margin);
        let reserved = self.space_book().reserve(target.entry(), reservation, target.operation());
        let promise = self.mention_trash(reserved)?;
        self.create_image_from(target.entry(), promise, |image| {
            settings.record(image, target.entry())?;
            mark_sharing(&original).context("mark the source of", target.entry())?;
            mark_sharing(image).context("set up", target.entry())?;
            share(&original, image, target)?;
            target.record(image, source, size)?;
            let Some(capacity) = clone else { return Ok(()) };
            // A thick image gets all blocks: FICLONE leaves holes where the source was never written. Shared blocks stay shared.
            allocate(image, Bytes(0), capacity, settings.provisioning).context("allocate", target.entry())
        })
        // After an error it is unknown which blocks the source shares.
        .inspect_err(|_| self.space_book().invalidate_total())
    }

    /// Returns `true` if the total includes the margin of an image. The total still includes that of an image that shares no blocks
    /// any more, until a count leaves it out. The next call therefore counts the total again in this case.
    fn has_margin(
        &self,
        image: &OwnedFd,
        entry: ContentSource<'_>,
        provisioning: Provisioning,
    ) -> Result<bool> {
        if provisioning == Provisioning::Thin || !may_share(image)? {
            return Ok(provisioning == Provisioning::Thin);
        }
        let shares = shares_blocks(image).context("list the blocks of", entry)?;
        if !shares {
            self.space_book().invalidate_total();
        }
        Ok(shares)
    }
}

fn share(original: &OwnedFd, image: &OwnedFd, target: CopyTarget<'_>) -> Result<()> {
    reflink::share_content(original.as_fd(), image.as_fd()).map_err(|errno| {
        let error = Error::sys(target.operation(), target.entry(), errno);
        match errno {
            Errno::EOPNOTSUPP => error.explain(reflink::NO_REFLINK),
            _ => error,
        }
    })
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;
    use crate::error::ErrorKind;
    use crate::volume_store::id::SnapshotId;

    #[test]
    fn a_missing_reflink_names_the_remedy() {
        let memory = || memfd_create(c"image", MFdFlags::MFD_CLOEXEC).unwrap();
        let id = SnapshotId::parse("copy").unwrap();
        let error = share(&memory(), &memory(), CopyTarget::Snapshot { id: &id }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("reflink=1"), "{error}");
    }
}
