//! Expanding a volume while it is in use. A capacity never shrinks.

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::stat::fstat;
use nix::unistd::{fsync, ftruncate};

use super::id::VolumeId;
use super::on_disk::{DirectoryAttributes, Image, read_capacity, write_capacity};
use super::source::ContentSource;
use super::space::{reservation_of_directory, reservation_to_expand, reserves_margin};
use super::spec::{Provisioning, VolumeKind, rounded};
use super::store::VolumeStore;
use super::volume::Volume;
use crate::error::{Context, Result};
use crate::flock;
use crate::loop_device::Access;
use crate::project_quota::Limits;
use crate::units::Bytes;

impl VolumeStore {
    /// Expands a volume to at least `capacity`, and returns it. Does nothing if the volume is large enough already, as for 0 bytes, so
    /// the call can be repeated. Of concurrent calls the largest capacity wins. The capacity of a loop device is updated by
    /// [`refresh_capacity`](crate::loop_device::LoopDevice::refresh_capacity). [`Publisher::expand`](crate::publish::Publisher::expand) does
    /// both; a publisher in another process does not notice this call.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound);
    /// [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace): the file system has less available space, and the
    /// volume is unchanged; [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): no volume can have that size;
    /// [`ErrorKind::Damaged`](crate::ErrorKind::Damaged): the image is truncated, and an expansion would hide that.
    pub fn expand(&self, id: &VolumeId, capacity: Bytes) -> Result<Volume> {
        // No volume has 0 bytes, so every volume is larger.
        let capacity = rounded(capacity.max(Bytes(1)), id)?;
        let _lock = self.layout.lock_shared()?;
        let volume = self.volume(id)?;
        self.mention_trash(match volume.kind() {
            VolumeKind::Filesystem => self.expand_directory(&volume, capacity),
            VolumeKind::Block => self.expand_image(&volume, capacity),
        })?;
        self.volume(id)
    }

    /// Reads, reserves and sets the limit while the reservation record is locked. So each of several concurrent calls finds the
    /// limit that the others have set, and none lowers it. (A lock on the directory itself would not do: its owner could hold
    /// it.)
    fn expand_directory(&self, volume: &Volume, capacity: Bytes) -> Result<()> {
        if volume.capacity() < capacity {
            let entry = ContentSource::Volume(volume.id());
            let DirectoryAttributes { project, spec } = volume.attributes()?;
            let expanded = reservation_of_directory(capacity, spec);
            let limits = || {
                // The project id of a deleted volume may be another volume's by now.
                self.require_undeleted(&volume.entry, entry, "expand")?;
                volume.limits()
            };
            self.space_book().reserve_limit(
                entry,
                "expand",
                || Ok(expanded.saturating_sub(limits()?)),
                || {
                    let now = limits()?;
                    let limits = Limits::hard(now.bytes.max(expanded.bytes), now.inodes.max(expanded.inodes));
                    volume.quota().set_limits(project, limits).map(drop)
                },
            )?;
        }
        // Also if another call has set the limit: its process may have died before that was durable.
        self.layout.make_durable()
    }

    fn expand_image(&self, volume: &Volume, capacity: Bytes) -> Result<()> {
        let id = volume.id();
        let image = volume.open_image(Access::ReadWrite)?;
        // Two concurrent calls would truncate each other's allocation, or reserve it twice.
        let operation = "grow the volume, which locks its image";
        let _lock = flock::exclusive_reopened(image.as_fd(), self.options.lock_timeout, operation)?;
        let recorded = read_capacity(&image)?;
        let current = size_of(&image, id)?;
        if current.max(recorded) < capacity {
            volume.require_whole()?;
            self.allocate_more(&image, id, current, capacity)?;
        }
        // The process of another call may have died after it expanded the image and before it recorded the capacity.
        let size = size_of(&image, id)?;
        if recorded < size {
            write_capacity(&image, size)?;
            return fsync(&image).context("fsync volume", id);
        }
        // It may also have died before the recorded capacity was durable.
        self.layout.make_durable()
    }

    fn allocate_more(&self, image: &OwnedFd, id: &VolumeId, current: Bytes, capacity: Bytes) -> Result<()> {
        let provisioning = Image::read(image)?.provisioning;
        let more = reservation_to_expand(current, capacity, reserves_margin(image, provisioning)?);
        let promise = self.space_book().reserve(ContentSource::Volume(id), more, "expand")?;
        let allocated = allocate(image, current, capacity, provisioning);
        if allocated.is_err() && size_of(image, id).is_ok_and(|size| size == current) {
            promise.release();
        }
        allocated.context("grow volume", id)
    }
}

fn size_of(image: &OwnedFd, id: &VolumeId) -> Result<Bytes> {
    Ok(Bytes(fstat(image).context("fstat volume", id)?.st_size as u64))
}

/// Expands `image` from `current` bytes, its size, to `capacity`, completely or not at all. A thick image gets its blocks, a thin one does
/// not. If XFS runs out of space, it leaves the allocated blocks past the end of the file, and it may leave some in other cases too.
/// Truncating the file to its size frees them.
pub(super) fn allocate(
    image: &OwnedFd,
    current: Bytes,
    capacity: Bytes,
    provisioning: Provisioning,
) -> Result<(), Errno> {
    let more = capacity.saturating_sub(current);
    let allocated = match provisioning {
        Provisioning::Thick => fallocate(image, FallocateFlags::empty(), current.0 as i64, more.0 as i64),
        Provisioning::Thin => Ok(()),
    };
    let size = if allocated.is_ok() { capacity } else { current };
    ftruncate(image, size.0 as i64)?;
    allocated
}
