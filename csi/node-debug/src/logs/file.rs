//! A log file, which is followed across rotation.
//!
//! A file may be rotated in two ways. If it is renamed and a new file is created, the old one is read to its end before
//! the new one is opened. If it is copied and truncated, reading starts again at the beginning; what the component wrote
//! between the last read and the truncation is lost, as for every program that follows such a file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use nix::fcntl::OFlag;

/// The newest bytes of a log that a call returns before it follows.
pub(super) const MAX_BYTES: usize = 4 << 20;
/// The bytes of one part of a stream.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;

/// The position in one file, or in the file that replaced it.
#[derive(Debug)]
pub(super) struct FileReader {
    path: PathBuf,
    current: Option<Current>,
    /// Nothing was read yet. Only of the first file is the old content skipped.
    is_first: bool,
    /// Old content was skipped, so that the first bytes may be within a line.
    pub(super) begins_within: bool,
    /// A file that does not exist is awaited.
    may_be_absent: bool,
}

#[derive(Debug)]
struct Current {
    file: File,
    identity: (u64, u64),
    offset: u64,
    /// The last line that was read has no end yet.
    is_in_line: bool,
}

impl FileReader {
    pub(super) fn new(path: PathBuf, may_be_absent: bool) -> Self {
        Self { path, current: None, is_first: true, begins_within: false, may_be_absent }
    }

    /// Returns what the file has after the position; nothing at its end.
    pub(super) fn next(&mut self) -> anyhow::Result<Vec<u8>> {
        let context = || format!("read {}", self.path.display());
        if self.current.is_none() {
            self.current = self.open()?;
        }
        let Some(current) = &mut self.current else {
            ensure!(self.may_be_absent || !self.is_first, "{} does not exist", self.path.display());
            return Ok(Vec::new());
        };
        if self.is_first {
            self.begins_within = current.offset > 0;
        }
        self.is_first = false;
        // The comparison comes first: what the component wrote before it changed to a new file is read now.
        let is_replaced =
            identity(&self.path).with_context(context)?.is_some_and(|found| found != current.identity);
        let is_truncated = current.file.metadata().with_context(context)?.len() < current.offset;
        let mut content = Vec::new();
        if is_truncated {
            current.offset = current.file.seek(SeekFrom::Start(0)).with_context(context)?;
        } else {
            (&current.file).take(CHUNK_BYTES as u64).read_to_end(&mut content).with_context(context)?;
            current.offset += content.len() as u64;
        }
        let is_read = !is_truncated && content.is_empty();
        let is_end = is_truncated || (is_read && is_replaced);
        if is_end && current.is_in_line {
            content.push(b'\n');
        }
        current.is_in_line = content.last().map_or(current.is_in_line, |last| *last != b'\n');
        if is_read && is_replaced {
            self.current = None;
        }
        Ok(content)
    }

    /// Opens the file, the first one where its newest bytes begin. Returns `None` if it does not exist.
    fn open(&self) -> anyhow::Result<Option<Current>> {
        let context = || format!("open {}", self.path.display());
        // Without O_NONBLOCK, opening a named pipe of this name would wait for a writer.
        let mut file =
            match OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&self.path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error).with_context(context),
            };
        let metadata = file.metadata().with_context(context)?;
        let Some(entry) = found(fs::symlink_metadata(&self.path)).with_context(context)? else {
            return Ok(None);
        };
        let identity = identity_of(&metadata);
        if entry.is_symlink() {
            ensure!(
                is_trusted_link(entry.uid(), metadata.uid()),
                "{} is a symbolic link of user {} to a file of user {}; give node-debug the path of the file",
                self.path.display(),
                entry.uid(),
                metadata.uid()
            );
        } else if identity_of(&entry) != identity {
            // It was replaced since it was opened.
            return Ok(None);
        }
        ensure!(metadata.is_file(), "{} is not a regular file", self.path.display());
        // One byte more shows whether a line begins there.
        let skipped = metadata.len().saturating_sub(MAX_BYTES as u64 + 1);
        let offset =
            file.seek(SeekFrom::Start(if self.is_first { skipped } else { 0 })).with_context(context)?;
        Ok(Some(Current { file, identity, offset, is_in_line: false }))
    }
}

/// Returns `true` if a symbolic link of this user may lead to a file of that user. The service runs as root: a user who can
/// write the directory of a log could otherwise have any file read.
fn is_trusted_link(link_owner: u32, file_owner: u32) -> bool {
    link_owner == 0 || link_owner == file_owner
}

fn found(metadata: io::Result<fs::Metadata>) -> io::Result<Option<fs::Metadata>> {
    match metadata {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn identity(path: &Path) -> io::Result<Option<(u64, u64)>> {
    Ok(found(fs::metadata(path))?.as_ref().map(identity_of))
}

fn identity_of(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Links of root and of the owner of the file are trusted.
    #[rstest]
    #[case::of_root(0, 7, true)]
    #[case::of_the_same_user(7, 7, true)]
    #[case::to_a_file_of_root(7, 0, false)]
    #[case::to_a_file_of_another_user(7, 8, false)]
    fn link_of_another_user_is_untrusted(#[case] link: u32, #[case] file: u32, #[case] is_ok: bool) {
        assert_eq!(is_trusted_link(link, file), is_ok);
    }
}
