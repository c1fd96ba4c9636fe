//! The total of all reservations, counted from the quota records and the images.
//!
//! **Images.** fstat(2) counts a block that several images share after a clone for each of them, but it occupies the disk only
//! once. To find shared blocks, a count has to list the extents of an image. It does so only for images that took part in a
//! clone: [`may_share`] returns `true` for them. Of any other image it needs only the status.
//!
//! **The overhead** is the space that is neither free nor used by volumes. But the files of directories that share blocks, after
//! a copy by the store or a tenant's `cp --reflink`, are each charged for them. The difference is then too small, and asking
//! each file where its blocks are would take time proportional to the number of files. The store therefore records the overhead
//! while it is empty, and never assumes less. Inodes are no part of it.

use std::ffi::CStr;
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::fstatat;
use nix::sys::statvfs::fstatvfs;

use super::book::SpaceBook;
use super::record::Reserved;
use super::reservation::{FilesystemInodes, margin, provisioning, recorded};
use crate::error::{Context, ErrorKind, Result};
use crate::sys::fiemap::{self, FiemapExtent};
use crate::sys::xattr;
use crate::units::{Bytes, Inodes};
use crate::volume_store::on_disk::layout::PRIVATE;
use crate::volume_store::on_disk::{attribute, is_snapshot, layout, may_share};
use crate::volume_store::spec::Provisioning;

/// On `.loopfs`: bytes in use beside inodes, and the size of the file system, when the store was empty.
const OVERHEAD: &CStr = c"trusted.loopfs.overhead";
/// The free-space trees of XFS grow and shrink by a few blocks.
const FLUCTUATION: Bytes = Bytes(256 << 10);

impl SpaceBook<'_> {
    /// Returns the size of the file system and its free space.
    pub(super) fn blocks(&self) -> Result<(Bytes, Bytes)> {
        let status = fstatvfs(&self.filesystem.root).context("statfs", self.filesystem.path.display())?;
        let unit = status.fragment_size();
        Ok((Bytes(status.blocks() * unit), Bytes(status.blocks_available() * unit)))
    }

    /// Counts the reservations from the quota records and the images, and the overhead from the free space.
    pub(super) fn count(&self) -> Result<Reserved> {
        let (mut volumes, mut in_use) = (Bytes(0), Bytes(0));
        let (mut inodes, mut inodes_in_use) = (0u64, 0u64);
        for usage in self.filesystem.quota().ids(self.range.clone()) {
            let usage = usage?;
            // A volume over its limit uses more than its reservation.
            volumes = volumes.saturating_add(usage.limits.bytes.unwrap_or_default().max(usage.bytes));
            in_use = in_use.saturating_add(usage.bytes);
            inodes = inodes.saturating_add(usage.limits.inodes.unwrap_or_default().max(usage.inodes).0);
            inodes_in_use = inodes_in_use.saturating_add(usage.inodes.0);
        }
        let mut shared = SharedBlocks::default();
        for directory in self.layout.entry_directories() {
            for name in layout::names(directory, "volumes, snapshots and trash")? {
                if let Some(image) = ImageSpace::count(directory, &name, &mut shared)? {
                    volumes = volumes.saturating_add(image.reserved);
                    in_use = in_use.saturating_add(image.alone);
                }
            }
        }
        in_use = in_use.saturating_add(shared.space_on_disk());
        let of_filesystem = FilesystemInodes::read(self.filesystem)?;
        in_use = in_use.saturating_add(of_filesystem.allocated());
        // Images, directories of the store, and files of other programs.
        inodes = inodes.saturating_add(of_filesystem.in_use().0.saturating_sub(inodes_in_use));
        let (total, free) = self.blocks()?;
        let overhead = total.saturating_sub(free).saturating_sub(in_use).max(self.least_overhead(total)?);
        Ok(Reserved { volumes, inodes: Inodes(inodes), overhead, exact: true })
    }

    /// Records the overhead if the store is empty and has no record yet. The caller has locked `staging`.
    pub(crate) fn record_overhead(&self) -> Result<()> {
        if self.recorded_overhead()?.is_some() || self.layout.has_entries()? {
            return Ok(());
        }
        let inodes = FilesystemInodes::read(self.filesystem)?.allocated();
        let (total, free) = self.blocks()?;
        let overhead = total.saturating_sub(free).saturating_sub(inodes).saturating_sub(FLUCTUATION);
        let text = format!("bytes={} of={}", overhead.0, total.0);
        match xattr::set(&self.layout.private, OVERHEAD, text.as_bytes())
            .context("write the attribute of", PRIVATE)
        {
            // A read-only file system takes no reservations.
            Err(error) if error.kind() == ErrorKind::ReadOnly => Ok(()),
            written => written,
        }
    }

    /// Returns the least overhead of the file system if it has the size `total`.
    fn least_overhead(&self, total: Bytes) -> Result<Bytes> {
        let Some((bytes, of)) = self.recorded_overhead()? else { return Ok(Bytes(0)) };
        // A file system that was expanded uses more.
        let now = u128::from(bytes) * u128::from(total.0) / u128::from(of.max(1));
        Ok(Bytes(u64::try_from(now).unwrap_or(bytes)))
    }

    fn recorded_overhead(&self) -> Result<Option<(u64, u64)>> {
        attribute::read(&self.layout.private, OVERHEAD, "read the attribute of", PRIVATE, parse_overhead)
    }
}

fn parse_overhead(text: &str) -> Option<(u64, u64)> {
    let (bytes, of) = text.split_once(' ')?;
    Some((bytes.strip_prefix("bytes=")?.parse().ok()?, of.strip_prefix("of=")?.parse().ok()?))
}

/// The space of one image, as a count finds it.
struct ImageSpace {
    /// The reservation of the image.
    reserved: Bytes,
    /// Allocated, without the blocks that it shares.
    alone: Bytes,
}

impl ImageSpace {
    /// Counts one image, and adds its shared blocks to `shared`. Returns `None` for an entry that is not an image, and for one
    /// that was removed since it was listed.
    fn count(directory: &OwnedFd, name: &str, shared: &mut SharedBlocks) -> Result<Option<Self>> {
        let status = match fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => return Ok(None),
            status => status.context("count the space of image", name)?,
        };
        if status.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Ok(None);
        }
        let allocated = Bytes::from_basic_blocks(status.st_blocks as u64);
        let mut alone = allocated;
        let image = match layout::open_beneath(directory.as_fd(), name, OFlag::O_RDONLY | OFlag::O_NONBLOCK) {
            Err(Errno::ENOENT) => return Ok(None),
            image => image.context("count the space of image", name)?,
        };
        // An image keeps its reservation if it was truncated, in the trash or by another program.
        let size = Bytes(status.st_size as u64).max(recorded(&image).unwrap_or_default());
        let mut sharing = false;
        if may_share(&image)? {
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

/// Returns `true` if an image shares blocks with another file now. Reads extents up to the first shared one.
pub(crate) fn shares_blocks(image: impl AsFd) -> std::result::Result<bool, Errno> {
    let mut found = false;
    each_shared(image.as_fd(), |_| {
        found = true;
        ControlFlow::Break(())
    })?;
    Ok(found)
}

/// Calls `visit` for each shared extent of an image, until it breaks.
fn each_shared(
    image: BorrowedFd<'_>,
    mut visit: impl FnMut(&FiemapExtent) -> ControlFlow<()>,
) -> std::result::Result<(), Errno> {
    let mut next_offset = 0;
    loop {
        let extents = fiemap::extents(image, next_offset)?;
        let shared = extents.iter().filter(|extent| extent.flags & fiemap::SHARED != 0);
        if shared.map(&mut visit).any(|flow| flow.is_break()) {
            return Ok(());
        }
        match extents.last() {
            Some(last) if last.flags & fiemap::LAST == 0 => {
                next_offset = last.logical.saturating_add(last.length);
            }
            _ => return Ok(()),
        }
    }
}

/// The shared blocks of all images that were added.
#[derive(Debug, Default)]
struct SharedBlocks {
    /// Byte ranges on the disk. They overlap, because each range comes once from each image that has it.
    ranges: Vec<Range<u64>>,
}

impl SharedBlocks {
    /// Adds the shared blocks of an image, and returns the number of bytes that they have in this image.
    fn add(&mut self, image: impl AsFd) -> std::result::Result<Bytes, Errno> {
        let mut in_image = 0u64;
        each_shared(image.as_fd(), |extent| {
            in_image = in_image.saturating_add(extent.length);
            self.ranges.push(extent.physical..extent.physical.saturating_add(extent.length));
            ControlFlow::Continue(())
        })?;
        Ok(Bytes(in_image))
    }

    /// Returns the space on the disk, in which each block counts once.
    fn space_on_disk(mut self) -> Bytes {
        self.ranges.sort_unstable_by_key(|range| range.start);
        let (mut total, mut counted_to) = (0u64, 0u64);
        for range in self.ranges {
            total = total.saturating_add(range.end.saturating_sub(range.start.max(counted_to)));
            counted_to = counted_to.max(range.end);
        }
        Bytes(total)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_overhead_reads_back() {
        assert_eq!(parse_overhead("bytes=4096 of=1048576"), Some((4096, 1 << 20)));
        for text in ["", "bytes=4096", "bytes=x of=1", "of=1 bytes=2", "bytes=1 of=-1"] {
            assert_eq!(parse_overhead(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn overlapping_ranges_count_once(ranges in proptest::collection::vec((0u64..200, 0u64..50), 0..20)) {
            let ranges: Vec<_> = ranges.into_iter().map(|(start, length)| start..start + length).collect();
            let bytes: HashSet<u64> = ranges.iter().cloned().flatten().collect();
            prop_assert_eq!(SharedBlocks { ranges }.space_on_disk(), Bytes(bytes.len() as u64));
        }
    }
}
