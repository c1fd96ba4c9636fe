//! An initramfs: a cpio archive in the "newc" format, written without any program.
//!
//! The kernel accepts several archives one after the other, and later files replace earlier ones. The part
//! that is the same for every boot can therefore be a separate archive.

use std::io::{self, Write};

const FILE: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const SYMBOLIC_LINK: u32 = 0o120_000;

/// Writes one archive. Its entries have no times and root as their owner, so equal input produces equal
/// output.
#[derive(Debug)]
pub struct Archive<W> {
    output: W,
    written: u64,
    next_inode: u32,
    directories: Vec<String>,
}

impl<W: Write> Archive<W> {
    /// Begins an archive.
    pub fn new(output: W) -> Archive<W> {
        Archive { output, written: 0, next_inode: 1, directories: Vec::new() }
    }

    /// Adds a file at an absolute path, and the directories above it.
    ///
    /// # Errors
    /// The output cannot be written, or the file has 4 GiB or more, which the format cannot represent.
    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, FILE | mode, (0, 0), content)
    }

    /// Adds a directory and those above it.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        let path = relative(path);
        if path.is_empty() || self.directories.iter().any(|known| known == path) {
            return Ok(());
        }
        self.parents(path)?;
        self.directories.push(path.to_owned());
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Adds a symbolic link at an absolute path.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn symbolic_link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, SYMBOLIC_LINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds the node of a character device.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn character_device(&mut self, path: &str, mode: u32, device: (u32, u32)) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, CHARACTER_DEVICE | mode, device, &[])
    }

    /// Ends the archive, padded so that another can follow.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.pad(512)?;
        self.output.flush()?;
        Ok(self.output)
    }

    fn parents(&mut self, path: &str) -> io::Result<()> {
        match relative(path).rsplit_once('/') {
            Some((parent, _)) => self.directory(parent),
            None => Ok(()),
        }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let name = relative(path);
        let size = u32::try_from(content.len())
            .map_err(|error| io::Error::other(format!("{path} is too large for a cpio archive: {error}")))?;
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

fn relative(path: &str) -> &str {
    path.trim_start_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<u8> {
        let mut archive = Archive::new(Vec::new());
        archive.file("/init", 0o755, b"abc").unwrap();
        archive.file("/a/b/c", 0o644, b"").unwrap();
        archive.file("/a/b/d", 0o644, b"12345").unwrap();
        archive.character_device("/dev/console", 0o600, (5, 1)).unwrap();
        archive.symbolic_link("/link", "/init").unwrap();
        archive.finish().unwrap()
    }

    /// Returns (name, mode, size) of each entry, by the rules of the format.
    fn entries(mut bytes: &[u8]) -> Vec<(String, u32, u32)> {
        let mut entries = Vec::new();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |index: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * index..14 + 8 * index]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6), field(11) as usize);
            let name = std::str::from_utf8(&bytes[110..110 + name_size - 1]).unwrap().to_owned();
            if name == "TRAILER!!!" {
                return entries;
            }
            let content = (110 + name_size).next_multiple_of(4);
            let next = (content + size as usize).next_multiple_of(4);
            entries.push((name, mode, size));
            bytes = &bytes[next..];
        }
    }

    #[test]
    fn parents_precede_their_files_once() {
        let names: Vec<String> = entries(&sample()).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, ["init", "a", "a/b", "a/b/c", "a/b/d", "dev", "dev/console", "link"]);
    }

    #[test]
    fn modes_and_sizes_are_carried() {
        let entries = entries(&sample());
        assert_eq!(entries[0], ("init".to_owned(), 0o100_755, 3));
        assert_eq!(entries[1], ("a".to_owned(), 0o040_755, 0));
        assert_eq!(entries[4].2, 5);
        assert_eq!(entries[6].1, 0o020_600);
        assert_eq!(entries[7], ("link".to_owned(), 0o120_777, 5));
    }

    /// The padding lets another archive follow.
    #[test]
    fn archive_is_padded_and_reproducible() {
        assert_eq!(sample().len() % 512, 0);
        assert_eq!(sample(), sample());
    }
}
