//! The space that the file system uses for itself, where usage of volumes hides it.
//!
//! The overhead is the space that is neither free nor used by volumes. But the files of directories that share blocks, after a
//! copy by the store or a tenant's `cp --reflink`, are each charged for them. The difference is then too small, and asking
//! each file where its blocks are would take time proportional to the number of files. The store therefore records the overhead
//! while it is empty, and never assumes less. Inodes are no part of it (`inodes.rs`).

use std::ffi::CStr;

use super::book::SpaceBook;
use crate::error::{Context, ErrorKind, Result};
use crate::sys::xattr;
use crate::units::Bytes;
use crate::volume_store::on_disk::{attribute, layout};

/// On `.loopfs`: bytes in use beside inodes, and the size of the file system, when the store was empty.
const NAME: &CStr = c"trusted.loopfs.overhead";
const OBJECT: &str = ".loopfs";
/// The free-space trees of XFS grow and shrink by a few blocks.
const FLUCTUATION: Bytes = Bytes(256 << 10);

impl SpaceBook<'_> {
    /// Records the overhead if the store is empty and has no record yet. The caller has locked the data directory.
    pub(crate) fn record_overhead(&self) -> Result<()> {
        if self.recorded_overhead()?.is_some() || !self.is_empty()? {
            return Ok(());
        }
        let inodes = self.inodes()?.allocated();
        let (total, free) = self.blocks()?;
        let overhead = total.saturating_sub(free).saturating_sub(inodes).saturating_sub(FLUCTUATION);
        let text = format!("bytes={} of={}", overhead.0, total.0);
        match xattr::set(&self.layout.private, NAME, text.as_bytes())
            .context("write the attribute of", OBJECT)
        {
            // A read-only file system takes no reservations.
            Err(error) if error.kind() == ErrorKind::ReadOnly => Ok(()),
            written => written,
        }
    }

    /// Returns the least overhead of the file system if it has the size `total`.
    pub(super) fn least_overhead(&self, total: Bytes) -> Result<Bytes> {
        let Some((bytes, of)) = self.recorded_overhead()? else { return Ok(Bytes(0)) };
        // A file system that was expanded uses more.
        let now = u128::from(bytes) * u128::from(total.0) / u128::from(of.max(1));
        Ok(Bytes(u64::try_from(now).unwrap_or(bytes)))
    }

    fn is_empty(&self) -> Result<bool> {
        for directory in self.layout.entry_directories().chain([&self.layout.staging]) {
            if !layout::names(directory, "the directories of the store")?.is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn recorded_overhead(&self) -> Result<Option<(u64, u64)>> {
        attribute::read(&self.layout.private, NAME, "read the attribute of", OBJECT, parse)
    }
}

fn parse(text: &str) -> Option<(u64, u64)> {
    let (bytes, of) = text.split_once(' ')?;
    Some((bytes.strip_prefix("bytes=")?.parse().ok()?, of.strip_prefix("of=")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_reads_back_and_other_text_is_rejected() {
        assert_eq!(parse("bytes=4096 of=1048576"), Some((4096, 1 << 20)));
        for text in ["", "bytes=4096", "bytes=x of=1", "of=1 bytes=2", "bytes=1 of=-1"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
