//! Blocks that several images share after a clone.
//!
//! fstat(2) counts a shared block for each file that has it, but it occupies the disk only once. To find shared blocks, a
//! count of the reservations has to list the extents of an image. It does so only for images that took part in a clone:
//! these have the attribute of [`shares`](crate::volume_store::on_disk::shares). Of any other image it needs only the
//! status.

use std::ops::{ControlFlow, Range};
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;

use crate::sys::fiemap::{self, Extent};
use crate::units::Bytes;

/// Returns `true` if an image shares blocks with another file now. Reads extents up to the first shared one.
pub(crate) fn shares_blocks(image: impl AsFd) -> Result<bool, Errno> {
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
    mut visit: impl FnMut(&Extent) -> ControlFlow<()>,
) -> Result<(), Errno> {
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
pub(super) struct SharedBlocks {
    /// Byte ranges on the disk. They overlap, because each range comes once from each image that has it.
    ranges: Vec<Range<u64>>,
}

impl SharedBlocks {
    /// Adds the shared blocks of an image, and returns the number of bytes that they have in this image.
    pub(super) fn add(&mut self, image: impl AsFd) -> Result<Bytes, Errno> {
        let mut in_image = 0u64;
        each_shared(image.as_fd(), |extent| {
            in_image = in_image.saturating_add(extent.length);
            self.ranges.push(extent.physical..extent.physical.saturating_add(extent.length));
            ControlFlow::Continue(())
        })?;
        Ok(Bytes(in_image))
    }

    /// Returns the space on the disk, in which each block counts once.
    pub(super) fn space_on_disk(mut self) -> Bytes {
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

    proptest! {
        #[test]
        fn a_byte_in_several_ranges_counts_once(ranges in proptest::collection::vec((0u64..200, 0u64..50), 0..20)) {
            let ranges: Vec<_> = ranges.into_iter().map(|(start, length)| start..start + length).collect();
            let bytes: HashSet<u64> = ranges.iter().cloned().flatten().collect();
            prop_assert_eq!(SharedBlocks { ranges }.space_on_disk(), Bytes(bytes.len() as u64));
        }
    }
}
