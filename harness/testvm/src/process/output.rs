//! Standard input and output of a child. They are files rather than pipes, so that no reader has to keep up
//! with the child.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result};

pub(super) type LineSink = Box<dyn FnMut(&str) + Send>;

/// The destination of a child's output: one log file, or two unnamed files that are read after its end.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) stdout: File,
    pub(super) stderr: File,
    pub(super) log: Option<PathBuf>,
}

impl Output {
    pub(super) fn open(log: Option<&Path>) -> Result<Output> {
        let Some(path) = log else {
            return Ok(Output { stdout: tempfile::tempfile()?, stderr: tempfile::tempfile()?, log: None });
        };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("open {}", path.display()))?;
        Ok(Output { stdout: file.try_clone()?, stderr: file, log: Some(path.to_owned()) })
    }

    /// Returns the number of bytes that were written so far.
    pub(super) fn length(&self) -> Result<u64> {
        Ok(self.stdout.metadata()?.len() + self.stderr.metadata()?.len())
    }

    pub(super) fn read(&mut self) -> Result<(String, String)> {
        if self.log.is_some() {
            return Ok(Default::default());
        }
        let read = |file: &mut File| -> Result<String> {
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(0))?;
            file.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        Ok((read(&mut self.stdout)?, read(&mut self.stderr)?))
    }
}

/// Returns a standard input with these bytes.
pub(super) fn input(bytes: &[u8]) -> Result<Stdio> {
    if bytes.is_empty() {
        return Ok(Stdio::null());
    }
    let mut file = tempfile::tempfile()?;
    file.write_all(bytes)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file.into())
}

/// Copies a child's lines as they arrive, and passes each to `sink`.
pub(super) fn tee_lines(pipe: impl Read, mut sink: LineSink, mut copy: File) {
    let mut reader = BufReader::new(pipe);
    let mut line = Vec::new();
    while matches!(reader.read_until(b'\n', &mut line), Ok(count) if count > 0) {
        // A full disk is reported elsewhere. The reader must continue, or the child blocks.
        drop(copy.write_all(&line));
        sink(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
}
