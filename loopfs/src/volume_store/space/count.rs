//! The total of all reservations, counted from the volumes.

use nix::sys::statvfs::fstatvfs;

use super::book::SpaceBook;
use super::image_space::ImageSpace;
use super::record::Reserved;
use super::shared_blocks::SharedBlocks;
use crate::error::{Context, Result};
use crate::units::{Bytes, Inodes};
use crate::volume_store::on_disk::layout;

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
            volumes = volumes.saturating_add(usage.limits.bytes.hard.unwrap_or_default().max(usage.bytes));
            in_use = in_use.saturating_add(usage.bytes);
            inodes = inodes.saturating_add(usage.limits.inodes.hard.unwrap_or_default().max(usage.inodes).0);
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
        let of_filesystem = self.inodes()?;
        in_use = in_use.saturating_add(of_filesystem.allocated());
        // Images, directories of the store, and files of other programs.
        inodes = inodes.saturating_add(of_filesystem.in_use().0.saturating_sub(inodes_in_use));
        let (total, free) = self.blocks()?;
        let overhead = total.saturating_sub(free).saturating_sub(in_use).max(self.least_overhead(total)?);
        Ok(Reserved { volumes, inodes: Inodes(inodes), overhead, exact: true })
    }
}
