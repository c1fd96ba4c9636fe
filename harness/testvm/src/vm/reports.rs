//! The host's side of the report port. It writes log lines to files and passes other messages to the machine.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use tokio::sync::watch;

/// The log files, one per source, each created at its first line.
#[derive(Debug)]
pub(super) struct Logs {
    directory: PathBuf,
    files: HashMap<String, File>,
    times: watch::Sender<LineTimes>,
}

/// The times at which the host received each line of each source.
pub type LineTimes = HashMap<String, Vec<Instant>>;

impl Logs {
    pub(super) fn new(directory: PathBuf) -> Result<Logs> {
        std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        Ok(Logs { directory, files: HashMap::new(), times: watch::Sender::default() })
    }

    /// Returns the times of the lines, so that callers can wait for a line.
    pub(super) fn times(&self) -> watch::Receiver<LineTimes> {
        self.times.subscribe()
    }

    pub(super) fn line(&mut self, source: &str, line: &str) -> Result<()> {
        if !self.files.contains_key(source) {
            let path = self.directory.join(file_name(source));
            // Append: a machine that boots again continues its log.
            let file = OpenOptions::new()
                .create(true)
                .append(true)
                .open(&path)
                .with_context(|| format!("open {}", path.display()))?;
            self.files.insert(source.to_owned(), file);
        }
        if let Some(file) = self.files.get_mut(source) {
            writeln!(file, "{line}").with_context(|| format!("write the log of {source}"))?;
        }
        let now = Instant::now();
        self.times.send_modify(|times| match times.get_mut(source) {
            Some(times) => times.push(now),
            None => drop(times.insert(source.to_owned(), vec![now])),
        });
        Ok(())
    }
}

/// Returns the file name of a source. The guest chooses the source's name, so the result must stay in the
/// directory.
fn file_name(source: &str) -> String {
    let safe = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    let name: String =
        source.chars().map(|character| if safe(character) { character } else { '-' }).collect();
    format!("{}.log", name.trim_start_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each source has one file, even if its name has `..`.
    #[test]
    fn log_files_stay_inside_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let mut logs = Logs::new(dir.path().to_owned()).unwrap();
        logs.line("kubelet", "one").unwrap();
        logs.line("../../etc/x", "two").unwrap();
        logs.line("kubelet", "three").unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("kubelet.log")).unwrap(), "one\nthree\n");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        assert_eq!(logs.times().borrow()["kubelet"].len(), 2);
    }
}
