//! An initramfs: a cpio archive in the "newc" format, written without any program.
//!
//! The kernel accepts several archives one after the other, and later files replace earlier ones. The part
//! that is the same for every boot can therefore be a separate archive.

use std::collections::BTreeSet;
use std::io::{self, Write};

const FILE: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const SYMBOLIC_LINK: u32 = 0o120_000;

/// Writes one archive. Its entries have no times and root as their owner, so equal input produces equal
/// output.
#[derive(Debug)]
pub(crate) struct Archive<W> {
    output: W,
    written: u64,
    next_inode: u32,
    directories: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(output: W) -> Archive<W> {
        Archive { output, written: 0, next_inode: 1, directories: BTreeSet::new() }
    }

    /// Adds a file at an absolute path, and the directories above it. It fails for a file of 4 GiB or more, which the format
    /// cannot represent.
    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.add(path, FILE | mode, (0, 0), content)
    }

    pub(crate) fn symbolic_link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.add(path, SYMBOLIC_LINK | 0o777, (0, 0), target.as_bytes())
    }

    pub(crate) fn character_device(&mut self, path: &str, mode: u32, device: (u32, u32)) -> io::Result<()> {
        self.add(path, CHARACTER_DEVICE | mode, device, &[])
    }

    /// Ends the archive, padded so that another can follow.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.pad(512)?;
        self.output.flush()?;
        Ok(self.output)
    }

    /// Adds an entry, and before it the directories above it that are missing.
    fn add(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        for (end, _) in path.match_indices('/') {
            let directory = &path[..end];
            if self.directories.insert(directory.to_owned()) {
                self.entry(directory, DIRECTORY | 0o755, (0, 0), &[])?;
            }
        }
        self.entry(path, mode, device, content)
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let size = u32::try_from(content.len())
            .map_err(|error| io::Error::other(format!("{name} is too large for a cpio archive: {error}")))?;
        let inode = self.next_inode;
        self.next_inode += 1;
        let name_size = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        // magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor,
        // namesize, check
        let mut header = String::from("070701");
        for field in [inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0] {
            header.push_str(&format!("{field:08X}"));
        }
        self.write(header.as_bytes())?;
        self.write(name.as_bytes())?;
        self.write(&[0])?;
        self.pad(4)?;
        self.write(content)?;
        self.pad(4)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.output.write_all(bytes)
    }

    fn pad(&mut self, to: u64) -> io::Result<()> {
        const ZEROS: [u8; 512] = [0; 512];
        let gap = self.written.next_multiple_of(to) - self.written;
        self.written += gap;
        self.output.write_all(&ZEROS[..usize::try_from(gap).map_err(io::Error::other)?])
    }
}
