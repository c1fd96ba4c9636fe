//! What the file system can still promise.
//!
//! A directory's limit is a promise although nothing is allocated for it, so free blocks alone
//! would let volumes be sold twice. So it is with a clone: its blocks are the source's until one of
//! the two is written, and then there must be others.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{MutexGuard, PoisonError};

use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::fstatat;
use nix::sys::statvfs::fstatvfs;

use super::id::VolumeId;
use super::sharing::{self, SharedBlocks};
use super::{VolumeStore, layout};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::project_quota::ProjectQuota;
use crate::units::Bytes;

/// Room on the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Its size.
    pub total: Bytes,
    /// The largest volume that can be made now: what is neither promised to a volume, whether
    /// used or not, nor taken by the file system's own structures. For an image it is some ten
    /// blocks less, which the file system wants to have free meanwhile.
    pub available: Bytes,
}

/// A count of what is promised, taken once and kept up to date by this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Promised {
    /// To volumes, deleted ones in the trash among them.
    volumes: Bytes,
    /// In use by no volume: metadata, and files that are not the store's.
    overhead: Bytes,
}

impl VolumeStore {
    /// Room on the file system for new volumes.
    ///
    /// # Errors
    /// Those of statfs(2) and quotactl_fd(2).
    pub fn space(&self) -> Result<Space> {
        let mut promised = self.promised();
        let counted = match *promised {
            Some(counted) => counted,
            None => self.count()?,
        };
        *promised = Some(counted);
        self.space_beside(counted)
    }

    /// Sets bytes aside for a volume, or says how much was asked and how much there is.
    pub(super) fn promise(&self, id: &VolumeId, bytes: Bytes, operation: &'static str) -> Result<()> {
        let mut promised = self.promised();
        let mut counted = match *promised {
            Some(counted) => counted,
            None => self.count()?,
        };
        let mut space = self.space_beside(counted)?;
        if bytes > space.available {
            // Another process may have deleted volumes since they were counted, and XFS frees the blocks of
            // what was deleted in the background.
            ProjectQuota::of(self.filesystem.root.as_fd()).finish_frees(*self.options.project_ids.start())?;
            counted = self.count()?;
            space = self.space_beside(counted)?;
        }
        if bytes > space.available {
            *promised = Some(counted);
            let detail = format!(
                "{bytes} asked, {} available of {} that the file system has",
                space.available, space.total
            );
            return Err(Error::new(ErrorKind::NoSpace, operation, id, detail));
        }
        counted.volumes = counted.volumes.saturating_add(bytes);
        *promised = Some(counted);
        Ok(())
    }

    /// Takes a promise back.
    pub(super) fn withdraw(&self, bytes: Bytes) {
        if let Some(counted) = self.promised().as_mut() {
            counted.volumes = counted.volumes.saturating_sub(bytes);
        }
    }

    /// Forgets the count: what it says is no longer so.
    pub(super) fn count_anew(&self) {
        *self.promised() = None;
    }

    fn promised(&self) -> MutexGuard<'_, Option<Promised>> {
        // A panic in between leaves a count that is too high at worst, and is counted again.
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn space_beside(&self, promised: Promised) -> Result<Space> {
        let (total, free) = self.blocks()?;
        let unpromised = total.saturating_sub(promised.volumes).saturating_sub(promised.overhead);
        Ok(Space { total, available: unpromised.min(free) })
    }

    fn blocks(&self) -> Result<(Bytes, Bytes)> {
        let status = fstatvfs(&self.filesystem.root).context("statfs", self.filesystem.path.display())?;
        let unit = status.fragment_size();
        Ok((Bytes(status.blocks() * unit), Bytes(status.blocks_available() * unit)))
    }

    fn count(&self) -> Result<Promised> {
        let (mut volumes, mut in_use) = (Bytes(0), Bytes(0));
        for usage in ProjectQuota::of(self.filesystem.root.as_fd()).ids(self.options.project_ids.clone()) {
            let usage = usage?;
            // Over its limit, a volume takes more than it was promised.
            volumes = volumes.saturating_add(usage.limits.bytes.hard.unwrap_or_default().max(usage.bytes));
            in_use = in_use.saturating_add(usage.bytes);
        }
        let mut shared = SharedBlocks::default();
        for directory in [&self.layout.volumes, &self.layout.trash] {
            for name in layout::names(directory, "volumes and trash")? {
                if let Some(image) = count_image(directory, &name, &mut shared)? {
                    volumes = volumes.saturating_add(image.promised);
                    in_use = in_use.saturating_add(image.alone);
                }
            }
        }
        in_use = in_use.saturating_add(shared.once());
        let (total, free) = self.blocks()?;
        Ok(Promised { volumes, overhead: total.saturating_sub(free).saturating_sub(in_use) })
    }
}

struct ImageSpace {
    promised: Bytes,
    /// In use, without the blocks that it shares.
    alone: Bytes,
}

/// None for what is not an image, and for one that was removed since it was listed.
fn count_image(directory: &OwnedFd, name: &str, shared: &mut SharedBlocks) -> Result<Option<ImageSpace>> {
    let Ok(status) = fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) else { return Ok(None) };
    if status.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Ok(None);
    }
    let size = Bytes(status.st_size as u64);
    let mut alone = Bytes::from_basic_blocks(status.st_blocks as u64);
    let mut margin = Bytes(0);
    let Ok(image) = layout::open_beneath(directory.as_fd(), name, OFlag::O_RDONLY | OFlag::O_NONBLOCK) else {
        return Ok(None);
    };
    if sharing::may_share(&image).context("read the attributes of image", name)? {
        let common = shared.add(&image).context("list the blocks of image", name)?;
        alone = alone.saturating_sub(common);
        if common > Bytes(0) {
            margin = sharing::margin(size);
        }
    }
    // The extent tree of a fragmented image comes on top of its size.
    Ok(Some(ImageSpace { promised: size.max(alone).saturating_add(margin), alone }))
}
