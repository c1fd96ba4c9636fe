//! The total of all reservations, counted from the volumes.

use nix::sys::statvfs::fstatvfs;

use super::book::SpaceBook;
use super::image_space::ImageSpace;
use super::record::Reserved;
use super::shared_blocks::SharedBlocks;
use crate::error::{Context, Result};
use crate::project_quota::ProjectId;
use crate::units::Bytes;
use crate::volume_store::on_disk::layout;

/// The number of projects of other programs that are asked for their usage. The owner of a volume can give each of its files
/// another project. Such files must not delay the calls for other volumes. The overhead has the rest.
const MAX_OTHERS: usize = 4096;

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
        for usage in self.filesystem.quota().ids(self.range.clone()) {
            let usage = usage?;
            // A volume over its limit uses more than its reservation.
            volumes = volumes.saturating_add(usage.limits.bytes.hard.unwrap_or_default().max(usage.bytes));
            in_use = in_use.saturating_add(usage.bytes);
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
        let (total, free) = self.blocks()?;
        let overhead =
            total.saturating_sub(free).saturating_sub(in_use).saturating_sub(self.used_by_others()?);
        Ok(Reserved { volumes, overhead: overhead.max(self.least_overhead(total)?), exact: true })
    }

    /// Returns the bytes that are charged to projects of other programs. It takes two system calls, and one for each such
    /// project.
    pub(super) fn used_by_others(&self) -> Result<Bytes> {
        let ids = |first, last| Some(ProjectId::new(first)?..=ProjectId::new(last)?);
        let below = ids(1, self.range.start().get() - 1);
        let above = ids(self.range.end().get() + 1, u32::MAX - 1);
        let projects = below.into_iter().chain(above).flat_map(|range| self.filesystem.quota().ids(range));
        let mut used = Bytes(0);
        for usage in projects.take(MAX_OTHERS) {
            used = used.saturating_add(usage?.bytes);
        }
        Ok(used)
    }
}
