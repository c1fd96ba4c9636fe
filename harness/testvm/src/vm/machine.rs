//! A running virtual machine and its one owner.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use testvm_guest::report::{Message, Verdict};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::command::{CONSOLE_SOCKET, CONTROL_SOCKET, MONITOR_SOCKET, REPORT_SOCKET, arguments};
use super::console::Watcher;
use super::control::Control;
use super::monitor;
use super::phase::{ExitReason, Phase};
use super::reports::{LineTimes, Logs};
use super::spec::{Disk, DiskMode, VmSpec, scratch_directory};
use crate::disk_space::{self, BOOT_MIB};
use crate::process::{Process, tail};
use crate::progress::seconds;

/// The timeout of QEMU's connections. QEMU connects to its sockets before it starts the guest.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The time from the verdict to the power-off, in which the guest only syncs its disks.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of attempts to boot if QEMU aborts.
const MAX_BOOTS: usize = 3;
/// The time to read remaining output. The console may lag behind the report port, and the stack follows a
/// fatal line.
const FINAL_OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);

/// A running machine. Dropping it cuts its power.
#[derive(Debug)]
pub struct Vm {
    name: String,
    process: Process,
    control: Control,
    phase: watch::Receiver<Phase>,
    messages: mpsc::UnboundedReceiver<Message>,
    said: watch::Receiver<LineTimes>,
    console: Arc<Mutex<Watcher>>,
    /// The tasks that serve the sockets. They end when the machine is dropped.
    _tasks: JoinSet<()>,
    _sockets: tempfile::TempDir,
}

impl Vm {
    /// Starts QEMU, and waits until PID 1 runs.
    ///
    /// An emulating QEMU 10.0 occasionally aborts if one processor of a guest maps devices, as it does while
    /// it boots, and another processor accesses some (`iotlb_to_section: Assertion ... failed`). The guest
    /// has not caused it and has not done any work yet, so this function boots it again. It does not retry
    /// after a crash of the guest.
    ///
    /// # Errors
    /// As [`start`](Vm::start), or the machine ends first, or `timeout` passes.
    pub async fn boot(spec: &VmSpec, timeout: Duration) -> Result<Vm> {
        let mut boots = 1;
        loop {
            let mut vm = Vm::start(spec).await?;
            match vm.wait_started(timeout).await {
                Err(_) if boots < MAX_BOOTS && vm.has_aborted().await => boots += 1,
                started => return started.map(|()| vm),
            }
        }
    }

    /// Starts QEMU, and returns before the guest has booted.
    ///
    /// # Errors
    /// QEMU is not installed or rejects the specification.
    pub async fn start(spec: &VmSpec) -> Result<Vm> {
        let sockets = tempfile::Builder::new().prefix("testvm-").tempdir().context("make a directory")?;
        let listen = |name: &str| {
            let path = sockets.path().join(name);
            UnixListener::bind(&path).with_context(|| format!("listen on {}", path.display()))
        };
        let (console, report, control, monitor) = (
            listen(CONSOLE_SOCKET)?,
            listen(REPORT_SOCKET)?,
            listen(CONTROL_SOCKET)?,
            listen(MONITOR_SOCKET)?,
        );
        for directory in spec.disks.iter().filter_map(Disk::written_directory) {
            disk_space::require(&directory, BOOT_MIB).with_context(|| format!("start {}", spec.name))?;
        }
        for disk in spec.disks.iter().filter(|disk| disk.mode == DiskMode::Logged) {
            let log = disk.write_log();
            // QEMU writes to an existing file and does not create one.
            std::fs::File::create(&log).with_context(|| format!("make {}", log.display()))?;
        }
        let qemu_log = spec.logs.join("qemu.log");
        let mut process = spec
            .hypervisor
            .qemu
            .program()
            .args(arguments(spec, sockets.path()))
            .env("TMPDIR", scratch_directory())
            .log(&qemu_log)
            .spawn()
            .with_context(|| format!("start the virtual machine {}", spec.name))?;
        let connected =
            async { tokio::try_join!(accept(&console), accept(&report), accept(&control), accept(&monitor)) };
        let (console, report, control, monitor) = tokio::select! {
            connected = tokio::time::timeout(CONNECT_TIMEOUT, connected) => {
                connected.with_context(|| format!("QEMU of {} did not connect", spec.name))??
            }
            status = process.wait() => {
                let said = std::fs::read_to_string(&qemu_log).unwrap_or_default();
                anyhow::bail!("QEMU of {} ended with {}:\n{}", spec.name, status?, tail(&said, 10))
            }
        };

        let (phase_sender, phase) = watch::channel(Phase::Booting);
        let (message_sender, messages) = mpsc::unbounded_channel();
        let console_state = Arc::new(Mutex::new(Watcher::default()));
        let (fatal_sender, fatal) = mpsc::channel(1);
        let mut tasks = JoinSet::new();
        tasks.spawn(watch_console(
            console,
            spec.logs.join("console.log"),
            Arc::clone(&console_state),
            fatal_sender,
        ));
        let logs = Logs::new(spec.logs.clone())?;
        let said = logs.times();
        let crash_report = CrashReport { fatal, console: Arc::clone(&console_state), qemu_log };
        let disk_error = monitor::disk_error(monitor, spec.disks.clone());
        tasks.spawn(follow(report, disk_error, logs, crash_report, phase_sender, message_sender));
        let (control, responses) = Control::new(control, phase.clone());
        tasks.spawn(responses);
        Ok(Vm {
            name: spec.name.clone(),
            process,
            control,
            phase,
            messages,
            said,
            console: console_state,
            _tasks: tasks,
            _sockets: sockets,
        })
    }

    /// Returns the name of the machine in messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the client for requests to the node in the machine.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Returns the machine's progress, on which other tasks can wait too.
    #[must_use]
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.clone()
    }

    /// Returns the next message of the guest that is not a log line, or `None` after the machine has ended.
    pub async fn next_message(&mut self) -> Option<Message> {
        self.messages.recv().await
    }

    /// Waits until PID 1 runs.
    ///
    /// # Errors
    /// The machine ends first, or `timeout` passes.
    pub async fn wait_started(&self, timeout: Duration) -> Result<()> {
        let phase = self.wait_phase("did not boot", timeout, |phase| *phase != Phase::Booting).await?;
        match phase {
            Phase::Ended(ExitReason::Failed(why) | ExitReason::Crashed(why)) => {
                anyhow::bail!("{}: {why}", self.name)
            }
            _ => Ok(()),
        }
    }

    /// Waits until the node has done all its steps.
    ///
    /// # Errors
    /// The machine ends first, or `timeout` passes.
    pub async fn wait_ready(&self, timeout: Duration) -> Result<()> {
        let ready = |phase: &Phase| matches!(phase, Phase::Ready | Phase::Ended(_));
        let reached = self.wait_phase("was not ready", timeout, ready).await?;
        match reached {
            Phase::Ended(ExitReason::Failed(why) | ExitReason::Crashed(why)) => {
                anyhow::bail!("{}: {why}", self.name)
            }
            Phase::Ended(ExitReason::Passed) => anyhow::bail!("{} was powered off", self.name),
            _ => Ok(()),
        }
    }

    /// Waits until `source` has logged this many lines since the machine was started.
    ///
    /// # Errors
    /// The machine ends first, or `timeout` passes.
    pub async fn wait_said(&self, source: &str, lines: usize, timeout: Duration) -> Result<()> {
        let mut said = self.said.clone();
        let enough = said.wait_for(|times| times.get(source).is_some_and(|times| times.len() >= lines));
        tokio::select! {
            // Lines logged before the end count.
            biased;
            // The channel closes when the machine has ended, and then the other branch has the reason.
            Ok(_) = enough => Ok(()),
            ending = self.wait_ended(timeout) => match ending? {
                ExitReason::Passed => anyhow::bail!("{} ended before {source} had said {lines} lines", self.name),
                ExitReason::Failed(why) | ExitReason::Crashed(why) => anyhow::bail!("{}: {why}", self.name),
            },
        }
    }

    /// Returns the times at which the host received the lines of each log.
    #[must_use]
    pub fn line_times(&self) -> LineTimes {
        self.said.borrow().clone()
    }

    /// Waits for the end of the machine.
    ///
    /// # Errors
    /// `timeout` passes first.
    pub async fn wait_ended(&self, timeout: Duration) -> Result<ExitReason> {
        let ended = |phase: &Phase| matches!(phase, Phase::Ended(_));
        let ended = self.wait_phase("did not end", timeout, ended).await?;
        match ended {
            Phase::Ended(ending) => Ok(ending),
            phase => anyhow::bail!("{} is {phase:?}", self.name),
        }
    }

    /// Returns `true` if QEMU has aborted, which only a fault of QEMU itself causes.
    async fn has_aborted(&mut self) -> bool {
        let ended = tokio::time::timeout(FINAL_OUTPUT_TIMEOUT, self.process.wait()).await;
        matches!(ended, Ok(Ok(status)) if is_abort(status))
    }

    async fn wait_phase(
        &self,
        otherwise: &str,
        timeout: Duration,
        reached: impl FnMut(&Phase) -> bool,
    ) -> Result<Phase> {
        let mut phase = self.phase.clone();
        let reached = tokio::time::timeout(timeout, phase.wait_for(reached)).await;
        let reached = reached.with_context(|| self.overdue(otherwise, timeout))?;
        Ok(reached.context("lost track of the machine")?.clone())
    }

    fn overdue(&self, what: &str, timeout: Duration) -> String {
        let watcher = self.console.lock().unwrap_or_else(PoisonError::into_inner);
        let phase = &*self.phase.borrow();
        let console = tail(&watcher.tail(), 10);
        format!(
            "{} {what} within {}: it is {phase:?}, and its console ends with\n{console}\n",
            self.name,
            seconds(timeout)
        )
    }

    /// Requests that the node stops its services, unmounts and powers off, and waits for the end of the
    /// machine.
    ///
    /// # Errors
    /// The node does not respond, does not end in time, or reports a failure.
    pub async fn power_off(mut self) -> Result<()> {
        self.control.power_off().await.with_context(|| format!("power {} off", self.name))?;
        let ending = self.wait_ended(POWER_OFF_TIMEOUT).await?;
        let switched_off = tokio::time::timeout(POWER_OFF_TIMEOUT, self.process.wait()).await;
        switched_off.with_context(|| format!("{} was not switched off", self.name))??;
        match ending {
            ExitReason::Passed => Ok(()),
            ExitReason::Failed(why) | ExitReason::Crashed(why) => anyhow::bail!("{}: {why}", self.name),
        }
    }

    /// Cuts the power without a flush or a shutdown. Persistent disks can be booted again.
    ///
    /// # Errors
    /// The state of the QEMU process is unknown.
    pub async fn power_cut(mut self) -> Result<()> {
        self.process.signal(Signal::SIGKILL);
        self.process.wait().await.map(drop)
    }
}

fn is_abort(status: ExitStatus) -> bool {
    status.signal() == Some(Signal::SIGABRT as i32)
}

async fn accept(listener: &UnixListener) -> Result<UnixStream> {
    Ok(listener.accept().await?.0)
}

/// Logs the console, and reports a crash of the kernel.
async fn watch_console(
    stream: UnixStream,
    log: impl AsRef<Path>,
    state: Arc<Mutex<Watcher>>,
    fatal: mpsc::Sender<()>,
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
            let mut watcher = state.lock().unwrap_or_else(PoisonError::into_inner);
            watcher.line(String::from_utf8_lossy(&line).trim_end());
            watcher.fatal().is_some()
        };
        if died {
            // One message is enough.
            fatal.try_send(()).ok();
        }
        line.clear();
    }
    if let Some(mut file) = file {
        drop(file.flush().await);
    }
}

/// The sources for the cause of an end without a verdict.
struct CrashReport {
    /// Receives a message when the kernel has crashed.
    fatal: mpsc::Receiver<()>,
    console: Arc<Mutex<Watcher>>,
    /// The log of QEMU's own output.
    qemu_log: PathBuf,
}

impl CrashReport {
    fn cause(&self) -> String {
        let watcher = self.console.lock().unwrap_or_else(PoisonError::into_inner);
        let cause = watcher.fatal().unwrap_or("it ended without a verdict");
        let qemu = std::fs::read_to_string(&self.qemu_log).unwrap_or_default();
        let qemu = tail(&qemu, 3);
        let said = if qemu.is_empty() { String::new() } else { format!("; QEMU said\n{qemu}\n") };
        format!("{cause}{said}; the end of its console:\n{}", watcher.tail())
    }
}

/// Reads the report port until the machine ends.
async fn follow(
    stream: UnixStream,
    disk_error: impl Future<Output = String>,
    mut logs: Logs,
    mut crash_report: CrashReport,
    phase: watch::Sender<Phase>,
    messages: mpsc::UnboundedSender<Message>,
) {
    let reports = read_reports(stream, &mut logs, &phase, &messages);
    let said = tokio::select! {
        said = reports => said,
        Some(()) = crash_report.fatal.recv() => None,
        why = disk_error => Some(ExitReason::Crashed(why)),
    };
    let ending = match said {
        Some(ending) => ending,
        None => {
            tokio::time::sleep(FINAL_OUTPUT_TIMEOUT).await;
            ExitReason::Crashed(crash_report.cause())
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
                return Some(match verdict {
                    Verdict::Passed => ExitReason::Passed,
                    Verdict::Failed(why) => ExitReason::Failed(why),
                });
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

    #[test]
    fn is_abort_is_true_only_for_sigabrt() {
        assert!(is_abort(ExitStatus::from_raw(6)));
        assert!(is_abort(ExitStatus::from_raw(6 | 0x80)), "with a core dump");
        // Killed, ended in order, and ended with an error.
        for other in [9, 0, 1 << 8] {
            assert!(!is_abort(ExitStatus::from_raw(other)), "{other}");
        }
    }
}
