//! The journal: a record of the operations on the store, on the disk that holds the store.
//!
//! Each line is written with direct I/O to a block of the journal's file that was allocated and synced before. It therefore
//! changes no relevant metadata, and makes nothing else durable. If a disk keeps its writes in order and has a line after
//! the power cut, it also has every write that had completed before the line. So a check needs the disk alone to know what
//! must be on it.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::line::Line;

/// The journal file in the root of the file system, beside the store's own directories.
const FILE: &str = "power-cut-journal";
/// The size of a file system block in bytes. Each line has a block of its own.
const BLOCK_SIZE: usize = 4096;
const MAX_LINES: usize = 2048;
/// The start of each line. The harness finds lines among the writes to the disk by this text.
const MAGIC: &str = "loopfs power cut: ";

/// A buffer with the alignment that direct I/O requires.
#[repr(align(4096))]
struct Block([u8; BLOCK_SIZE]);

#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    /// The number of the next free block.
    next_block: AtomicUsize,
}

impl Journal {
    pub(crate) fn create(root: &Path) -> std::io::Result<Journal> {
        let path = root.join(FILE);
        std::fs::write(&path, vec![0; MAX_LINES * BLOCK_SIZE])?;
        let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(&path)?;
        file.sync_all()?;
        File::open(root)?.sync_all()?;
        Ok(Journal { file, next_block: AtomicUsize::new(0) })
    }

    /// Writes a line to the disk, and then prints it. Returns `false`, without doing so, if the journal is full.
    pub(crate) fn write_line(&self, line: &Line) -> std::io::Result<bool> {
        let number = self.next_block.fetch_add(1, Ordering::Relaxed);
        if number >= MAX_LINES {
            return Ok(false);
        }
        let text = format!("{MAGIC}{line}\n");
        let mut block = Block([0; BLOCK_SIZE]);
        block.0[..text.len()].copy_from_slice(text.as_bytes());
        self.file.write_all_at(&block.0, (number * BLOCK_SIZE) as u64)?;
        println!("{line}");
        Ok(true)
    }
}

/// Returns the lines on a disk. Those of one thread are in order. Those of different threads may not be, because a thread
/// gets its block before it writes the line.
pub(crate) fn read(root: &Path) -> std::io::Result<Vec<Line>> {
    let content = std::fs::read(root.join(FILE))?;
    let texts = content.chunks(BLOCK_SIZE).filter_map(|block| {
        let text = std::str::from_utf8(block).ok()?;
        text.strip_prefix(MAGIC)?.split_once('\n')
    });
    Ok(texts.map(|(text, _)| Line::parse(text).unwrap_or_else(|| panic!("{text:?} is not a line"))).collect())
}
