//! A running virtual machine and its one owner.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use testvm_guest::report::Message;
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::command::{CONSOLE_SOCKET, CONTROL_SOCKET, MONITOR_SOCKET, REPORT_SOCKET, with_arguments};
use super::console::{Console, Watcher};
use super::control::Control;
use super::ending::{Evidence, FINAL_OUTPUT_TIMEOUT, POWER_OFF_TIMEOUT, checked_disks, follow};
use super::hypervisor::Accelerator;
use super::monitor::{self, Monitor};
use super::phase::{ExitReason, Phase};
use super::reports::{LineTimes, Logs};
use super::spec::{Disk, DiskMode, VmSpec, scratch_directory};
use super::{repeated_boots, sysrq};
use crate::disk_space::{self, BOOT_MIB};
use crate::process::{Process, tail};
use crate::progress::seconds;

/// The timeout of QEMU's connections. QEMU connects to its sockets before it starts the guest.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The number of attempts to boot if the emulator fails.
const MAX_BOOTS: usize = 3;

/// The name of the log of the console.
const CONSOLE_LOG: &str = "console.log";

/// A running machine. Dropping it cuts its power.
#[derive(Debug)]
pub struct Vm {
    name: String,
    process: Process,
    control: Control,
    phase: watch::Receiver<Phase>,
    messages: mpsc::UnboundedReceiver<Message>,
    said: watch::Receiver<LineTimes>,
    console: Console,
    console_input: OwnedWriteHalf,
    monitor: Monitor,
    /// The tasks that serve the sockets. They end when the machine is dropped.
    _tasks: JoinSet<()>,
    _sockets: tempfile::TempDir,
}

impl Vm {
    /// Starts QEMU, and waits until PID 1 runs.
    ///
    /// An emulating QEMU 10.0 occasionally aborts if one processor of a guest maps devices, as it does while
    /// it boots, and another processor accesses some (`iotlb_to_section: Assertion ... failed`). Rarely, an
    /// emulated guest hangs while it loads its drivers, or dies of a breakpoint with which its kernel has patched its own code and
    /// which it has removed since (`int3: 0000`). The guest has not done any work yet in these cases, so this function boots it again. It
    /// does not retry after another crash of the guest. [`report_repeated_boots`](super::report_repeated_boots) counts these boots.
    /// `console.failed-boot-N.log` has the console of such a boot, and of one that hung also the stacks of the guest's kernel.
    ///
    /// # Errors
    /// As [`start`](Vm::start), or the machine ends first, or `timeout` passes.
    pub async fn boot(spec: &VmSpec, timeout: Duration) -> Result<Vm> {
        let is_emulated = spec.hypervisor.accelerator == Accelerator::Tcg;
        let mut boot = 1;
        loop {
            let mut vm = Vm::start(spec).await?;
            match vm.wait_started(timeout).await {
                Err(_) if boot < MAX_BOOTS && vm.has_aborted().await => {
                    vm.end_failed_boot(spec, boot, "did not boot: QEMU aborted").await?;
                }
                Err(_) if boot < MAX_BOOTS && is_emulated && vm.is_booting() => {
                    let state = vm.show_state().await;
                    vm.end_failed_boot(spec, boot, &format!("did not boot: {state}")).await?;
                }
                Err(_) if boot < MAX_BOOTS && is_emulated && vm.console.lock().ran_breakpoint() => {
                    vm.end_failed_boot(spec, boot, "died of a breakpoint of its kernel").await?;
                }
                started => return started.map(|()| vm),
            }
            boot += 1;
        }
    }

    /// Starts QEMU, and returns before the guest has booted.
    ///
    /// # Errors
    /// QEMU is not installed or rejects the specification.
    pub async fn start(spec: &VmSpec) -> Result<Vm> {
        let disks = checked_disks(&spec.disks)?;
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
        let mut process = with_arguments(spec.hypervisor.qemu.program(), spec, sockets.path())
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
        let (fatal_sender, fatal) = mpsc::channel(1);
        let mut tasks = JoinSet::new();
        let watcher = Watcher::new(&spec.name, spec.kernel.expected_lines().clone());
        let (console, console_input) = console.into_split();
        let (console, reader) = Console::new(console, spec.logs.join(CONSOLE_LOG), watcher, fatal_sender);
        tasks.spawn(reader);
        let logs = Logs::new(spec.logs.clone())?;
        let said = logs.times();
        let evidence = Evidence { fatal, console: console.clone(), qemu_log, disks };
        let (monitor, qemu_messages) = monitor::open(monitor).await?;
        let disk_error = monitor::disk_error(qemu_messages, spec.disks.clone());
        tasks.spawn(follow(report, disk_error, logs, evidence, phase_sender, message_sender));
        let (control, responses) = Control::new(control, phase.clone());
        tasks.spawn(responses);
        Ok(Vm {
            name: spec.name.clone(),
            process,
            control,
            phase,
            messages,
            said,
            console,
            console_input,
            monitor,
            _tasks: tasks,
            _sockets: sockets,
        })
    }

    /// Returns the name of the machine in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the client for requests to the node in the machine.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Returns the machine's progress, on which other tasks can wait too.
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
            Phase::Ended(ending) => ending.success(&self.name),
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
        if let Phase::Ended(ending) = reached {
            ending.success(&self.name)?;
            anyhow::bail!("{} was powered off", self.name);
        }
        Ok(())
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
            ending = self.wait_ended(timeout) => {
                ending?.success(&self.name)?;
                anyhow::bail!("{} ended before {source} had said {lines} lines", self.name)
            }
        }
    }

    /// Returns the times at which the host received the lines of each log.
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

    fn is_booting(&self) -> bool {
        *self.phase.borrow() == Phase::Booting
    }

    /// Makes the kernel print its state to the console. Returns whether it did.
    async fn show_state(&mut self) -> String {
        let shown = sysrq::show_state(&mut self.monitor, &mut self.console_input, &self.console).await;
        shown.map_or_else(|error| format!("{error:#}"), |()| "its kernel responds to SysRq".to_owned())
    }

    /// Cuts the power of a machine that is booted again, and keeps its console.
    async fn end_failed_boot(mut self, spec: &VmSpec, boot: usize, why: &str) -> Result<()> {
        self.kill().await?;
        let (log, kept) =
            (spec.logs.join(CONSOLE_LOG), spec.logs.join(format!("console.failed-boot-{boot}.log")));
        std::fs::rename(&log, &kept).with_context(|| format!("rename {}", log.display()))?;
        repeated_boots::record(format!("{} {why}; it is booted again; see {}", self.name, kept.display()));
        Ok(())
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
        let phase = &*self.phase.borrow();
        let console = tail(&self.console.lock().tail(), 10);
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
    /// The node does not respond, does not end in time, or reports a failure. Its kernel has logged a fault, or a disk is
    /// corrupt.
    pub async fn power_off(mut self) -> Result<()> {
        self.control.power_off().await.with_context(|| format!("power {} off", self.name))?;
        // The services end and the disks are checked within this time as well.
        let ending = self.wait_ended(2 * POWER_OFF_TIMEOUT).await?;
        let switched_off = tokio::time::timeout(POWER_OFF_TIMEOUT, self.process.wait()).await;
        switched_off.with_context(|| format!("{} was not switched off", self.name))??;
        ending.success(&self.name)
    }

    /// Cuts the power without a flush or a shutdown. Persistent disks can be booted again.
    ///
    /// # Errors
    /// The state of the QEMU process is unknown, or the kernel has logged a fault.
    pub async fn power_cut(mut self) -> Result<()> {
        self.kill().await?;
        let faults = self.console.lock().faults();
        faults.map_or(Ok(()), |faults| Err(anyhow::Error::msg(faults)))
    }

    /// Kills QEMU, and waits until all of the console has been read.
    async fn kill(&mut self) -> Result<()> {
        self.process.signal(Signal::SIGKILL);
        self.process.wait().await?;
        let read = tokio::time::timeout(POWER_OFF_TIMEOUT, self.console.closed()).await;
        read.with_context(|| format!("the console of {} was not closed", self.name))?;
        Ok(())
    }
}

fn is_abort(status: ExitStatus) -> bool {
    status.signal() == Some(Signal::SIGABRT as i32)
}

async fn accept(listener: &UnixListener) -> Result<UnixStream> {
    Ok(listener.accept().await?.0)
}
