//! The lines, on the disk that they are about.
//!
//! Each line overwrites a block of a file that was written and synced before, past the page cache: it changes no
//! metadata that matters and makes nothing else durable, and a disk that keeps its writes in order holds it after all
//! that was on the disk when it was said. So a disk tells by itself what must be on it.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::line::Line;

/// Beside the store's own directories.
const FILE: &str = "power-cut-journal";
/// A file system block; each line has one.
const BLOCK: usize = 4096;
/// How many lines there can be.
const BLOCKS: usize = 2048;
/// Begins each line. The harness knows a line by it among the writes to the disk.
const MAGIC: &str = "loopfs power cut: ";

/// Direct I/O wants its buffers aligned.
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

    /// Writes a line to the disk, and says it. False if there is no room for it.
    pub(crate) fn say(&self, line: &Line) -> std::io::Result<bool> {
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

/// The lines on a disk. Those of one thread are in order.
pub(crate) fn read(root: &Path) -> std::io::Result<Vec<Line>> {
    let content = std::fs::read(root.join(FILE))?;
    let texts = content.chunks(BLOCK).filter_map(|block| {
        let text = std::str::from_utf8(block).ok()?;
        text.strip_prefix(MAGIC)?.split_once('\n')
    });
    Ok(texts.map(|(text, _)| Line::parse(text).unwrap_or_else(|| panic!("{text:?} is no line"))).collect())
}
