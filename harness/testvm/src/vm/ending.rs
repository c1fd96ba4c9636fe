//! Follows a machine to its end, and judges it: by the verdict of the guest, the kernel's log, and the disks.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use testvm_guest::report::Message;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};

use super::console::Console;
use super::phase::{ExitReason, Phase};
use super::reports::Logs;
use super::spec::{Disk, DiskMode};
use crate::images::disk;
use crate::process::tail;

/// The time from the verdict to the power-off, in which the guest only syncs its disks.
pub(super) const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(60);
/// The time to read remaining output. The console may lag behind the report port, and the stack follows a
/// fatal line.
pub(super) const FINAL_OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);

/// The sources for the judgement of an end.
pub(super) struct Evidence {
    /// Receives a message when the kernel has crashed.
    pub(super) fatal: mpsc::Receiver<()>,
    pub(super) console: Console,
    /// The log of QEMU's own output.
    pub(super) qemu_log: PathBuf,
    /// The disks that have to be consistent at the end.
    pub(super) disks: Vec<Disk>,
}

/// Returns the disks of a machine that are to be checked at its end: those that have an XFS when it starts, and keep what the
/// guest writes.
pub(super) fn checked_disks(disks: &[Disk]) -> Result<Vec<Disk>> {
    let mut checked = Vec::new();
    for disk in disks {
        let keeps = matches!(disk.mode, DiskMode::Persistent | DiskMode::Logged);
        if keeps && disk::is_xfs(&disk.image)? {
            checked.push(disk.clone());
        }
    }
    Ok(checked)
}

impl Evidence {
    fn cause(&self) -> String {
        let watcher = self.console.lock();
        let cause = watcher.fatal().unwrap_or("it ended without a verdict");
        let qemu = std::fs::read_to_string(&self.qemu_log).unwrap_or_default();
        let qemu = tail(&qemu, 3);
        let said = if qemu.is_empty() { String::new() } else { format!("; QEMU said\n{qemu}\n") };
        format!("{cause}{said}; the end of its console:\n{}", watcher.tail())
    }

    /// Waits until the machine is switched off, and adds the faults of its kernel and of its disks to the verdict.
    async fn examine(&self, verdict: ExitReason) -> ExitReason {
        if tokio::time::timeout(POWER_OFF_TIMEOUT, self.console.closed()).await.is_err() {
            let console = self.console.lock().tail();
            let why = format!(
                "it was not switched off within {POWER_OFF_TIMEOUT:?}; the end of its console:\n{console}"
            );
            return ExitReason::Crashed(why);
        }
        let mut faults = self.console.lock().end_faults();
        for disk in &self.disks {
            if let Err(error) = disk::check_xfs(&disk.image).await {
                faults.push(format!("the disk {}: {error:#}", disk.name));
            }
        }
        verdict.with_faults(&faults)
    }
}

/// Reads the report port until the machine ends.
pub(super) async fn follow(
    stream: UnixStream,
    disk_error: impl Future<Output = String>,
    mut logs: Logs,
    mut evidence: Evidence,
    phase: watch::Sender<Phase>,
    messages: mpsc::UnboundedSender<Message>,
) {
    let reports = read_reports(stream, &mut logs, &phase, &messages);
    let said = tokio::select! {
        said = reports => said,
        Some(()) = evidence.fatal.recv() => None,
        why = disk_error => Some(ExitReason::Crashed(why)),
    };
    let ending = match said {
        Some(crashed @ ExitReason::Crashed(_)) => crashed,
        Some(verdict) => evidence.examine(verdict).await,
        None => {
            tokio::time::sleep(FINAL_OUTPUT_TIMEOUT).await;
            ExitReason::Crashed(evidence.cause())
        }
    };
    phase.send_replace(Phase::Ended(ending));
}

/// Returns the exit reason of the verdict, or `None` if the port closed without one.
async fn read_reports(
    stream: UnixStream,
    logs: &mut Logs,
    phase: &watch::Sender<Phase>,
    messages: &mpsc::UnboundedSender<Message>,
) -> Option<ExitReason> {
    let mut lines = BufReader::new(stream).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let message = match serde_json::from_str(&line) {
            Ok(message) => message,
            Err(error) => {
                return Some(ExitReason::Crashed(format!(
                    "the guest said something unknown: {line}: {error}"
                )));
            }
        };
        match message {
            Message::Log { source, line } => {
                if let Err(error) = logs.line(&source, &line) {
                    return Some(ExitReason::Crashed(format!("{error:#}")));
                }
            }
            Message::Verdict(verdict) => {
                return Some(verdict.map_or_else(ExitReason::Failed, |()| ExitReason::Passed));
            }
            message => {
                match &message {
                    Message::Started { .. } => drop(phase.send_replace(Phase::Started)),
                    Message::NodeReady => drop(phase.send_replace(Phase::Ready)),
                    Message::ServiceEnded { name, how, restarted } => {
                        let what = if *restarted { "restarted" } else { "not restarted" };
                        // A failed write to the log is ignored here too.
                        drop(logs.line(name, &format!("-- the service ended: {how}; {what}")));
                    }
                    _ => {}
                }
                // The receiver of messages may have been dropped.
                drop(messages.send(message));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A logged disk keeps its writes as well.
    #[test]
    fn only_persistent_xfs_disks_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let disk = |name: &str, content: &str, mode| {
            let image = dir.path().join(name);
            std::fs::write(&image, content).unwrap();
            Disk { name: name.to_owned(), image, mode }
        };
        let disks = [
            disk("data", "XFSB and more", DiskMode::Persistent),
            disk("logged", "XFSB", DiskMode::Logged),
            disk("shared", "XFSB", DiskMode::Scratch),
            disk("root", "ext4", DiskMode::Persistent),
            disk("short", "X", DiskMode::Persistent),
        ];
        let names: Vec<String> = checked_disks(&disks).unwrap().into_iter().map(|disk| disk.name).collect();
        assert_eq!(names, ["data", "logged"]);
    }
}
