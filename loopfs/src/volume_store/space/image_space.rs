//! The space that an image reserves and uses.

use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{fstat, fstatat};

use super::reservation::{Reservation, margin, reservation_of_image};
use super::shared_blocks::SharedBlocks;
use crate::error::{Context, Result};
use crate::units::Bytes;
use crate::volume_store::on_disk::{Image, is_snapshot, layout, shares, sizes};
use crate::volume_store::spec::Provisioning;

/// The space of one image, as a count finds it.
pub(super) struct ImageSpace {
    /// The reservation of the image.
    pub(super) reserved: Bytes,
    /// Allocated, without the blocks that it shares.
    pub(super) alone: Bytes,
}

impl ImageSpace {
    /// Counts one image, and adds its shared blocks to `shared`. Returns `None` for an entry that is not an image, and for one
    /// that was removed since it was listed.
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
        let mut sharing = false;
        if shares::may_share(&image)? {
            let common = shared.add(&image).context("list the blocks of image", name)?;
            alone = alone.saturating_sub(common);
            sharing = common > Bytes(0);
        }
        let reserved = if is_snapshot(&image)? {
            // Nothing writes to a snapshot. Its blocks stay, and its extent tree was allocated when it was created.
            size.max(allocated)
        } else {
            // The extent tree of a fragmented image comes on top of its size. The file system preallocates blocks for writes
            // to shared blocks, but frees these when space runs short.
            let more =
                if sharing || provisioning(&image) == Provisioning::Thin { margin(size) } else { Bytes(0) };
            size.max(alone).saturating_add(more)
        };
        Ok(Some(Self { reserved, alone }))
    }
}

/// The reservation that the removal of an image from the trash releases.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Released {
    Known(Reservation),
    /// It depends on other images, so the total has to be counted.
    Unknown,
}

impl Released {
    /// Returns the reservation of an image. Call it before the image is truncated.
    pub(crate) fn of(image: &OwnedFd) -> Result<Self> {
        // Images that it shares blocks with may need less afterwards.
        let (Some(recorded), false) = (recorded(image), shares::may_share(image)?) else {
            return Ok(Self::Unknown);
        };
        let size =
            Bytes(fstat(image).context("fstat", "an image in the trash")?.st_size as u64).max(recorded);
        Ok(Self::Known(reservation_of_image(size, provisioning(image))))
    }
}

/// Returns the recorded capacity; `None` if there is none or if it cannot be read.
pub(crate) fn recorded(image: &OwnedFd) -> Option<Bytes> {
    sizes::read_capacity(image).ok()
}

/// Returns `Thin` also if the settings cannot be read: better to reserve too much.
fn provisioning(image: &OwnedFd) -> Provisioning {
    Image::read(image).map_or(Provisioning::Thin, |image| image.provisioning)
}
