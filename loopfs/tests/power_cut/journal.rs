//! The journal: the lines about a disk, on the same disk.
//!
//! Each line overwrites a block of a file that was written and synced before, past the page cache. It changes
//! no relevant metadata and makes nothing else durable. A disk that keeps its writes in order holds the line
//! after everything that was on the disk when the line was written. The disk therefore contains all
//! information about its expected state.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::line::Line;

/// The journal file in the root of the file system, beside the store's own directories.
const FILE: &str = "power-cut-journal";
/// The size of a file system block. Each line has one block.
const BLOCK: usize = 4096;
/// The maximum number of lines.
const BLOCKS: usize = 2048;
/// The start of each line. The harness finds lines among the writes to the disk by this text.
const MAGIC: &str = "loopfs power cut: ";

/// A buffer with the alignment that direct I/O requires.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    next: AtomicUsize,
}

impl Journal {
    pub(crate) fn create(root: &Path) -> std::io::Result<Journal> {
        let path = root.join(FILE);
        std::fs::write(&path, vec![0; BLOCKS * BLOCK])?;
        let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(&path)?;
        file.sync_all()?;
        File::open(root)?.sync_all()?;
        Ok(Journal { file, next: AtomicUsize::new(0) })
    }

    /// Writes a line to the disk and prints it. Returns `false` if the journal is full.
    pub(crate) fn write_line(&self, line: &Line) -> std::io::Result<bool> {
        let slot = self.next.fetch_add(1, Ordering::Relaxed);
        if slot >= BLOCKS {
            return Ok(false);
        }
        let text = format!("{MAGIC}{line}\n");
        let mut block = Block([0; BLOCK]);
        block.0[..text.len()].copy_from_slice(text.as_bytes());
        self.file.write_all_at(&block.0, (slot * BLOCK) as u64)?;
        println!("{line}");
        Ok(true)
    }
}

/// Returns the lines on a disk. The lines of one thread are in order.
pub(crate) fn read(root: &Path) -> std::io::Result<Vec<Line>> {
    let content = std::fs::read(root.join(FILE))?;
    let texts = content.chunks(BLOCK).filter_map(|block| {
        let text = std::str::from_utf8(block).ok()?;
        text.strip_prefix(MAGIC)?.split_once('\n')
    });
    Ok(texts.map(|(text, _)| Line::parse(text).unwrap_or_else(|| panic!("{text:?} is not a line"))).collect())
}
