//! The result of a program.

use std::path::PathBuf;
use std::process::ExitStatus;

/// The result of a program that ran to its end.
#[derive(Debug)]
pub struct Finished {
    pub name: String,
    pub status: ExitStatus,
    /// The standard output; empty if a log file was set.
    pub stdout: String,
    /// The standard error; empty if a log file was set.
    pub stderr: String,
    /// The file of the output, if one was set.
    pub(super) log: Option<PathBuf>,
}

impl Finished {
    /// Returns the error message for an unexpected status.
    #[must_use]
    pub fn failure(&self) -> String {
        let (output, hint) = self.output();
        format!("{} ended with {}{hint}:\n{output}", self.name, self.status)
    }

    /// Returns the end of the output, and where the whole is if it is in a file.
    pub(super) fn output(&self) -> (String, String) {
        let (output, hint) = match &self.log {
            Some(path) => {
                (std::fs::read_to_string(path).unwrap_or_default(), format!(" (see {})", path.display()))
            }
            None if self.stderr.trim().is_empty() => (self.stdout.clone(), String::new()),
            None => (self.stderr.clone(), String::new()),
        };
        (tail(&output, 20), hint)
    }
}

/// Returns the last `count` lines of a text.
#[must_use]
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
