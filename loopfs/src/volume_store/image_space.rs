//! The space that an image reserves and uses.

use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{fstat, fstatat};

use super::sharing::{self, SharedBlocks};
use super::{Image, Provisioning, layout, recorded_capacity, snapshot};
use crate::error::{Context, Result};
use crate::units::Bytes;

/// What a count finds of an image.
pub(super) struct ImageSpace {
    pub(super) promised: Bytes,
    /// In use, without the blocks that it shares.
    pub(super) alone: Bytes,
}

impl ImageSpace {
    /// Returns `None` for an entry that is not an image, and for one that was removed since it was listed.
    pub(super) fn count(directory: &OwnedFd, name: &str, shared: &mut SharedBlocks) -> Result<Option<Self>> {
        let Ok(status) = fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) else { return Ok(None) };
        if status.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Ok(None);
        }
        let allocated = Bytes::from_basic_blocks(status.st_blocks as u64);
        let mut alone = allocated;
        let Ok(image) = layout::open_beneath(directory.as_fd(), name, OFlag::O_RDONLY | OFlag::O_NONBLOCK)
        else {
            return Ok(None);
        };
        // An image keeps its reservation if it was truncated, in the trash or by another program.
        let size = Bytes(status.st_size as u64).max(recorded(&image).unwrap_or_default());
        let mut shares = false;
        if sharing::may_share(&image)? {
            let common = shared.add(&image).context("list the blocks of image", name)?;
            alone = alone.saturating_sub(common);
            shares = common > Bytes(0);
        }
        let promised = if snapshot::is_one(&image)? {
            // It is not written to: its blocks stay, and the tree of its extents came on top when it was made.
            size.max(allocated)
        } else {
            // The extent tree of a fragmented image comes on top of its size. What the file system has set aside for
            // writes to shared blocks it gives back when it is needed.
            let margin = if shares || is_thin(&image) { sharing::margin(size) } else { Bytes(0) };
            size.max(alone).saturating_add(margin)
        };
        Ok(Some(Self { promised, alone }))
    }
}

/// What the removal of an image from the trash releases.
#[derive(Clone, Copy, Debug)]
pub(super) enum Released {
    Bytes(Bytes),
    /// It depends on other images, and has to be counted.
    Unknown,
}

impl Released {
    /// The caller truncates the image before it is removed, unless its capacity is recorded nowhere else.
    pub(super) fn of(image: &OwnedFd) -> Result<Self> {
        // An image of an earlier version has no record. Images that it shared blocks with may need less than before.
        let (Some(recorded), false) = (recorded(image), sharing::may_share(image)?) else {
            return Ok(Self::Unknown);
        };
        let size =
            Bytes(fstat(image).context("fstat", "an image in the trash")?.st_size as u64).max(recorded);
        let margin = if is_thin(image) { sharing::margin(size) } else { Bytes(0) };
        Ok(Self::Bytes(size.saturating_add(margin)))
    }
}

/// One whose record cannot be read has its size.
pub(super) fn recorded(image: &OwnedFd) -> Option<Bytes> {
    recorded_capacity::read(image).ok().flatten()
}

/// An image that cannot be read reserves rather too much.
fn is_thin(image: &OwnedFd) -> bool {
    Image::read(image).map_or(true, |image| image.provisioning == Provisioning::Thin)
}
