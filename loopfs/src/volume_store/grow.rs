//! Making a volume larger while it is in use. Nothing here makes one smaller.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use nix::sys::stat::fstat;
use nix::unistd::{fsync, ftruncate};

use super::id::VolumeId;
use super::{
    ContentSource, Image, Provisioning, Volume, VolumeKind, VolumeStore, inodes_for, recorded_capacity,
    rounded, sharing,
};
use crate::error::{Context, Result};
use crate::flock;
use crate::loop_device::{Access, reopen};
use crate::project_quota::Limits;
use crate::units::Bytes;

impl VolumeStore {
    /// Makes a volume at least `capacity` large. Nothing happens to one that is as large already,
    /// so the call can be repeated. A loop device learns of it by
    /// [`refresh_capacity`](crate::LoopDevice::refresh_capacity).
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound);
    /// [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace): more than the file system can promise, the
    /// volume is left as it was; [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): no such size;
    /// [`ErrorKind::Damaged`](crate::ErrorKind::Damaged): an image that was cut off would only look whole.
    pub fn grow(&self, id: &VolumeId, capacity: Bytes) -> Result<Volume> {
        let capacity = rounded(capacity, id)?;
        let _lock = self.layout.lock_shared()?;
        let volume = self.volume(id)?;
        if volume.capacity() >= capacity {
            // Whoever made it so may have died before it was recorded or durable.
            if volume.kind() == VolumeKind::Block {
                grow_image(&volume, Bytes(0), self.options.lock_timeout)?;
            }
            self.layout.make_durable()?;
            return Ok(volume);
        }
        volume.require_whole()?;
        let mut more = capacity.saturating_sub(volume.capacity());
        if volume.image()?.is_some_and(|image| image.provisioning == Provisioning::Thin) {
            let margin = sharing::margin(capacity).saturating_sub(sharing::margin(volume.capacity()));
            more = more.saturating_add(margin);
        }
        let promise = self.promise(ContentSource::Volume(id), more, "grow")?;
        let grown = match volume.kind() {
            VolumeKind::Filesystem => grow_quota(&volume, capacity).and_then(|()| self.layout.make_durable()),
            VolumeKind::Block => grow_image(&volume, capacity, self.options.lock_timeout),
        };
        match grown {
            Ok(()) => self.volume(id),
            Err(error) => {
                promise.withdraw();
                Err(error)
            }
        }
    }
}

fn grow_quota(volume: &Volume, capacity: Bytes) -> Result<()> {
    let attributes = volume.attributes()?;
    let limits = Limits::hard(capacity, inodes_for(capacity, attributes.bytes_per_inode));
    volume.quota().set_limits(attributes.project, limits).map(drop)
}

fn grow_image(volume: &Volume, capacity: Bytes, lock_timeout: Duration) -> Result<()> {
    let image = volume.open_image(Access::ReadWrite)?;
    // A lock of its own file description: two calls must not truncate each other's work away.
    let own = reopen(image.as_fd(), OFlag::O_RDONLY).context("open the image of volume", volume.id())?;
    let _lock = flock::exclusive(own, lock_timeout, "grow the volume, which locks its image")?;
    let recorded = recorded_capacity::read(&image)?.unwrap_or_default();
    let current = Bytes(fstat(&image).context("fstat volume", volume.id())?.st_size as u64);
    if current < capacity {
        let provisioning = Image::read(&image)?.provisioning;
        allocate(&image, current, capacity, provisioning).context("grow volume", volume.id())?;
    } else if current <= recorded {
        return Ok(());
    }
    recorded_capacity::write(&image, current.max(capacity))?;
    fsync(&image).context("fsync volume", volume.id())
}

/// Makes `image`, `current` bytes large, as large as `capacity`, with or without the blocks for it.
pub(super) fn allocate(
    image: &OwnedFd,
    current: Bytes,
    capacity: Bytes,
    provisioning: Provisioning,
) -> Result<(), Errno> {
    match provisioning {
        Provisioning::Thick => preallocate(image, current, capacity),
        Provisioning::Thin => ftruncate(image, capacity.0 as i64),
    }
}

/// Allocates the bytes of `image` from `current`, its size, to `capacity`. All or nothing: XFS
/// leaves the blocks that it got past the end of the file when it runs out of space, and may
/// leave some when it does not; truncating to the size the file has drops them.
fn preallocate(image: &OwnedFd, current: Bytes, capacity: Bytes) -> Result<(), Errno> {
    let more = capacity.saturating_sub(current);
    let allocated = fallocate(image, FallocateFlags::empty(), current.0 as i64, more.0 as i64);
    let size = if allocated.is_ok() { capacity } else { current };
    ftruncate(image, size.0 as i64)?;
    allocated
}
