//! The log of a service on the node's own disk, for programs of the node that read logs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The size at which a log is renamed. With the file before it, a log takes at most twice as much.
const MAX_BYTES: u64 = 8 << 20;

/// A file to which lines are appended. It is renamed and created again before it exceeds a limit.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    max_bytes: u64,
}

impl LogFile {
    /// Opens the file, or creates it.
    pub(super) fn open(path: &str) -> Result<LogFile> {
        LogFile::with_limit(Path::new(path), MAX_BYTES).with_context(|| format!("open {path}"))
    }

    fn with_limit(path: &Path, max_bytes: u64) -> io::Result<LogFile> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(LogFile { path: path.to_owned(), file, bytes, max_bytes })
    }

    /// Appends a line.
    ///
    /// # Errors
    /// The file cannot be written, renamed or created.
    pub(super) fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let length = line.len() as u64;
        if self.bytes > 0 && self.bytes + length > self.max_bytes {
            // A crash after the rename leaves no file, and the next start creates it.
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            fs::rename(&self.path, older)?;
            *self = LogFile::with_limit(&self.path, self.max_bytes)?;
        }
        self.bytes += length;
        self.file.write_all(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only one older file is kept.
    #[test]
    fn full_log_rotates_between_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubelet.log");
        let mut log = LogFile::with_limit(&path, 10).unwrap();
        for line in ["1234\n", "5678\n", "9\n"] {
            log.append(line.as_bytes()).unwrap();
        }
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let files = || [read("kubelet.log.1"), read("kubelet.log")];
        assert_eq!(files(), ["1234\n5678\n", "9\n"]);
        // The size of what is there counts after a restart, and only one older file is kept.
        let mut log = LogFile::with_limit(&path, 10).unwrap();
        log.append(b"longer than ten bytes\n").unwrap();
        log.append(b"end\n").unwrap();
        assert_eq!(files(), ["longer than ten bytes\n", "end\n"]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
