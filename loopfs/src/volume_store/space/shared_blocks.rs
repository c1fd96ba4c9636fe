//! Blocks that several images share after a clone.
//!
//! The size of a file includes shared blocks for each file, but the file system stores them once. An attribute marks the
//! images that took part in a clone. The count reads the extents only of these images, and needs one call for each other image.

use std::os::fd::AsFd;

use nix::errno::Errno;

use crate::sys::fiemap;
use crate::units::Bytes;

/// Physical ranges of the file system that images share.
#[derive(Debug, Default)]
pub(super) struct SharedBlocks {
    /// The first byte of each range, and the one after the last.
    ranges: Vec<(u64, u64)>,
}

impl SharedBlocks {
    /// Adds the shared blocks of an image, and returns how many bytes of the image they are.
    pub(super) fn add(&mut self, image: impl AsFd) -> Result<Bytes, Errno> {
        let image = image.as_fd();
        let (mut shared, mut position) = (0u64, 0);
        loop {
            let extents = fiemap::extents(image, position)?;
            for extent in extents.iter().filter(|extent| extent.flags & fiemap::SHARED != 0) {
                shared = shared.saturating_add(extent.length);
                self.ranges.push((extent.physical, extent.physical.saturating_add(extent.length)));
            }
            match extents.last() {
                Some(last) if last.flags & fiemap::LAST == 0 => {
                    position = last.logical.saturating_add(last.length);
                }
                _ => return Ok(Bytes(shared)),
            }
        }
    }

    /// Returns the space of all ranges, each block counted once.
    pub(super) fn once(mut self) -> Bytes {
        self.ranges.sort_unstable();
        let (mut total, mut counted_to) = (0u64, 0u64);
        for (start, end) in self.ranges {
            total = total.saturating_add(end.saturating_sub(start.max(counted_to)));
            counted_to = counted_to.max(end);
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
        fn each_byte_is_counted_once(ranges in proptest::collection::vec((0u64..200, 0u64..50), 0..20)) {
            let ranges: Vec<_> = ranges.into_iter().map(|(start, length)| (start, start + length)).collect();
            let bytes: HashSet<u64> = ranges.iter().flat_map(|(start, end)| *start..*end).collect();
            prop_assert_eq!(SharedBlocks { ranges }.once(), Bytes(bytes.len() as u64));
        }
    }
}
