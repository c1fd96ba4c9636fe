//! The console of a machine: logged to a file, and watched for messages of a crashed or faulty kernel.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use testvm_guest::report::END_OF_CONSOLE;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::{mpsc, watch};

use crate::kernel_log::{ExpectedLines, Finding, classify};

/// The number of lines that are kept for an error message. A panic with its stack has fewer.
const TAIL: usize = 60;

/// The number of faults that an error message has.
const MAX_FAULTS: usize = 8;

/// Follows `Oops: ` since Linux 6.10, and begins the line before.
const BREAKPOINT: &str = "int3: 0000 [#1]";

/// A console that a task reads. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Console {
    watcher: Arc<Mutex<Watcher>>,
    /// Notifies of each line. The sender is dropped at the end of the console.
    lines: watch::Receiver<()>,
}

impl Console {
    /// Returns the console, and the task that reads it and appends it to `log`. The task sends a message when the kernel has
    /// crashed.
    pub(super) fn new(
        stream: OwnedReadHalf,
        log: PathBuf,
        watcher: Watcher,
        fatal: mpsc::Sender<()>,
    ) -> (Console, impl Future<Output = ()> + Send + use<>) {
        let (notify, lines) = watch::channel(());
        let console = Console { watcher: Arc::new(Mutex::new(watcher)), lines };
        let reader = console.clone();
        (console, async move { reader.read(stream, log, fatal, notify).await })
    }

    async fn read(
        &self,
        stream: OwnedReadHalf,
        log: PathBuf,
        fatal: mpsc::Sender<()>,
        notify: watch::Sender<()>,
    ) {
        let mut lines = BufReader::new(stream);
        let mut file = tokio::fs::OpenOptions::new().create(true).append(true).open(log).await.ok();
        let mut line = Vec::new();
        while matches!(lines.read_until(b'\n', &mut line).await, Ok(count) if count > 0) {
            if let Some(file) = &mut file {
                // A failed write to the log is ignored, because only the verdict decides.
                drop(file.write_all(&line).await);
            }
            let died = {
                let mut watcher = self.lock();
                watcher.line(String::from_utf8_lossy(&line).trim_end());
                watcher.fatal().is_some()
            };
            if died {
                // One message is enough.
                fatal.try_send(()).ok();
            }
            notify.send_replace(());
            line.clear();
        }
        if let Some(mut file) = file {
            drop(file.flush().await);
        }
    }

    /// Waits until QEMU has closed the console, as it does when it ends.
    pub(super) async fn closed(&self) {
        let mut lines = self.lines.clone();
        while lines.changed().await.is_ok() {}
    }

    /// Waits until one of the last lines contains `text`. Returns `false` if the console is closed first.
    pub(super) async fn shows(&self, text: &str) -> bool {
        let mut lines = self.lines.clone();
        lines.wait_for(|()| self.lock().tail.iter().any(|line| line.contains(text))).await.is_ok()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Watcher> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the last lines of a console, and detects crashes and faults.
#[derive(Debug)]
pub(super) struct Watcher {
    machine: String,
    expected: ExpectedLines,
    tail: VecDeque<String>,
    fatal: Option<String>,
    /// The first lines that report a fault, each once.
    faults: Vec<String>,
    more_faults: usize,
    complete: bool,
    ran_breakpoint: bool,
}

impl Watcher {
    pub(super) fn new(machine: &str, expected: ExpectedLines) -> Watcher {
        Watcher {
            machine: machine.to_owned(),
            expected,
            tail: VecDeque::new(),
            fatal: None,
            faults: Vec::new(),
            more_faults: 0,
            complete: false,
            ran_breakpoint: false,
        }
    }

    pub(super) fn line(&mut self, line: &str) {
        let line = without_escapes(line);
        let text = without_timestamp(&line);
        match classify(text, &self.machine, &self.expected) {
            Some(Finding::Crash) if self.fatal.is_none() => self.fatal = Some(text.to_owned()),
            Some(Finding::Fault)
                if self.faults.len() < MAX_FAULTS && !self.faults.iter().any(|known| known == text) =>
            {
                self.faults.push(text.to_owned());
            }
            Some(Finding::Fault) => self.more_faults += 1,
            _ => {}
        }
        self.complete |= text.contains(END_OF_CONSOLE);
        self.ran_breakpoint |= text.contains(BREAKPOINT);
        if self.tail.len() == TAIL {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }

    /// Returns the first line that reports a crash.
    pub(super) fn fatal(&self) -> Option<&str> {
        self.fatal.as_deref()
    }

    /// Returns `true` if the kernel died of a breakpoint of its own.
    pub(super) fn ran_breakpoint(&self) -> bool {
        self.ran_breakpoint
    }

    /// Returns the faults of a machine that ended in order. A console without the last line of PID 1 is one, because lines about
    /// faults are missing then too.
    pub(super) fn end_faults(&self) -> Vec<String> {
        let incomplete = format!(
            "the console of {} lacks the last line of the kernel's log, so faults could be missing",
            self.machine
        );
        self.faults().into_iter().chain((!self.complete).then_some(incomplete)).collect()
    }

    /// Returns the crash or the faults that the kernel has logged, as a text for an error.
    pub(super) fn faults(&self) -> Option<String> {
        let mut lines: Vec<&str> =
            self.fatal().into_iter().chain(self.faults.iter().map(String::as_str)).collect();
        if lines.is_empty() {
            return None;
        }
        let more = format!("and {} more lines; see console.log", self.more_faults);
        if self.more_faults > 0 {
            lines.push(&more);
        }
        Some(format!("the kernel of {} logged a fault:\n{}", self.machine, lines.join("\n")))
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
    use super::*;

    fn watcher() -> Watcher {
        Watcher::new("node-1", ExpectedLines::default())
    }

    /// The tail has a limited number of lines.
    #[test]
    fn first_fatal_line_is_the_cause() {
        let mut watcher = watcher();
        watcher.line("[    2.0] Oops: 0002 [#1] SMP");
        for index in 0..200 {
            watcher.line(&format!("line {index}"));
        }
        watcher.line("[    2.1] Kernel panic - not syncing: Fatal exception");
        assert_eq!(watcher.fatal(), Some("Oops: 0002 [#1] SMP"));
        assert_eq!(watcher.tail().lines().count(), TAIL);
        assert!(watcher.tail().ends_with("Fatal exception"));
    }

    /// The text has the machine, and a repeated fault counts once.
    #[test]
    fn first_faults_are_listed_others_counted() {
        let mut watcher = watcher();
        watcher.line("[    2.0] XFS (vda): Ending clean mount");
        assert_eq!(watcher.faults(), None);
        for index in 0..MAX_FAULTS + 2 {
            watcher.line(&format!("[    3.{index}] XFS (vda): Corruption detected {index}."));
        }
        let text = watcher.faults().unwrap();
        assert!(
            text.starts_with("the kernel of node-1 logged a fault:\nXFS (vda): Corruption detected 0."),
            "{text}"
        );
        watcher.line("[    4.0] XFS (vda): Corruption detected 0.");
        let text = watcher.faults().unwrap();
        assert!(text.ends_with("detected 7.\nand 3 more lines; see console.log"), "{text}");
        assert_eq!(watcher.fatal(), None);
    }

    /// PID 1 writes the final line.
    #[test]
    fn console_without_final_line_is_incomplete() {
        let mut watcher = watcher();
        watcher.line("[    2.0] reboot: Power down");
        assert_eq!(watcher.end_faults().len(), 1);
        watcher.line(&format!("[    2.1] {END_OF_CONSOLE}"));
        assert_eq!(watcher.end_faults(), Vec::<String>::new());
    }

    #[rstest::rstest]
    #[case::linux_6_1("[    3.093098] int3: 0000 [#1] PREEMPT SMP NOPTI", true)]
    #[case::linux_6_12("[    3.428101] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI", true)]
    #[case::another_fault("[    2.0] Oops: general protection fault: 0000 [#1] SMP", false)]
    fn kernel_breakpoint_is_recognised(#[case] line: &str, #[case] ran_breakpoint: bool) {
        let mut watcher = watcher();
        watcher.line(line);
        watcher.line("[    3.454089] Kernel panic - not syncing: Fatal exception in interrupt");
        assert_eq!(watcher.ran_breakpoint(), ran_breakpoint);
        assert!(watcher.fatal().is_some());
    }

    #[test]
    fn escape_sequences_are_removed() {
        assert_eq!(without_escapes("\u{1b}[2J\u{1b}[1;1HBooting\r"), "Booting");
    }
}
