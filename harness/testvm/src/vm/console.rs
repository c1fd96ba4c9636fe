//! The console of a machine: logged to a file, and watched for messages of a crashing kernel.

use std::collections::VecDeque;

/// The messages of a kernel that crashed.
const FATAL: [&str; 8] = [
    "Kernel panic - not syncing",
    "BUG: ",
    "Oops: ",
    "general protection fault",
    "Internal error: ",
    "blocked for more than",
    "rcu: INFO: rcu_sched detected stalls",
    "rcu: INFO: rcu_preempt detected stalls",
];

/// The number of lines that are kept for an error message. A panic with its stack has fewer.
const TAIL: usize = 60;

/// Keeps the last lines of a console and detects a crash.
#[derive(Debug, Default)]
pub(super) struct Watcher {
    tail: VecDeque<String>,
    fatal: Option<String>,
}

impl Watcher {
    pub(super) fn line(&mut self, line: &str) {
        let line = without_escapes(line);
        if self.fatal.is_none() && FATAL.iter().any(|word| line.contains(word)) {
            self.fatal = Some(without_timestamp(&line).to_owned());
        }
        if self.tail.len() == TAIL {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }

    /// Returns the first line that reports a crash.
    pub(super) fn fatal(&self) -> Option<&str> {
        self.fatal.as_deref()
    }

    pub(super) fn tail(&self) -> String {
        self.tail.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// Removes the escape sequences that firmware uses to clear the screen.
fn without_escapes(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character == '\u{1b}' {
            // CSI sequences end with a letter. A kernel does not print other escape sequences.
            characters.find(char::is_ascii_alphabetic);
        } else if !character.is_control() || character == '\t' {
            text.push(character);
        }
    }
    text
}

/// Returns `text` of a line `[   12.345678] text`.
fn without_timestamp(line: &str) -> &str {
    match line.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        Some((time, text)) if time.trim().parse::<f64>().is_ok() => text,
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("[    3.1] Kernel panic - not syncing: Attempted to kill init!", true)]
    #[case("[   99.0] BUG: kernel NULL pointer dereference, address: 0", true)]
    #[case("[  300.5] INFO: task xfsaild/vdb:77 blocked for more than 122 seconds.", true)]
    #[case("[    1.0] XFS (vdb): Mounting V5 Filesystem", false)]
    #[case("debugging: nothing", false)]
    fn a_crashed_kernel_is_recognised(#[case] line: &str, #[case] fatal: bool) {
        let mut watcher = Watcher::default();
        watcher.line(line);
        assert_eq!(watcher.fatal().is_some(), fatal);
    }

    #[test]
    fn the_first_fatal_line_is_the_cause_and_the_tail_is_bounded() {
        let mut watcher = Watcher::default();
        watcher.line("[    2.0] Oops: 0002 [#1] SMP");
        for index in 0..200 {
            watcher.line(&format!("line {index}"));
        }
        watcher.line("[    2.1] Kernel panic - not syncing: Fatal exception");
        assert_eq!(watcher.fatal(), Some("Oops: 0002 [#1] SMP"));
        assert_eq!(watcher.tail().lines().count(), TAIL);
        assert!(watcher.tail().ends_with("Fatal exception"));
    }

    #[test]
    fn escape_sequences_are_removed() {
        assert_eq!(without_escapes("\u{1b}[2J\u{1b}[1;1HBooting\r"), "Booting");
    }
}
