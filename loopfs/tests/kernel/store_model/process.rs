//! A process that performs operations, stopped before its system calls (ptrace(2)).
//!
//! Only one process runs at a time, and the test decides which one, so a plan has the same interleaving of system calls in each
//! run. No process waits in the kernel for another one: the store tries its locks at intervals, and a process is not stopped
//! while it holds a lease.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use nix::sys::ptrace::{self, Event, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::operation::{Operation, Outcome};
use super::system_calls;
use super::worker::{OUTCOME, READY, ROLE, TRACED};
use crate::environment::this_test_again;
use crate::namespaces::in_namespace;

pub(super) struct Process {
    child: Child,
    /// The thread that performs operations.
    thread: Pid,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

/// Why a process has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Before a system call.
    Call,
    /// Before it sleeps, because another process holds a lock.
    Sleep,
    /// Before it reads the next operation.
    Idle,
}

impl Process {
    /// Starts a process, and stops it before it reads the first operation.
    pub(super) fn start() -> Result<Self, String> {
        let mut child = spawn_isolated();
        let input = child.stdin.take().expect("its input");
        let mut output = BufReader::new(child.stdout.take().expect("its output")).lines();
        let thread = after(READY, &mut output).expect("the process is ready").parse().expect("a thread id");
        let mut process = Self { child, thread: Pid::from_raw(thread), input, output };
        ptrace::seize(process.thread, Options::PTRACE_O_TRACESECCOMP | Options::PTRACE_O_EXITKILL)
            .expect("trace the process");
        process.write(TRACED);
        while process.next_stop()? != Stop::Idle {
            process.resume(None)?;
        }
        Ok(process)
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Passes an operation to an idle process, which performs it when it is resumed.
    pub(super) fn send(&mut self, operation: Operation) {
        self.write(&serde_json::to_string(&operation).expect("an operation as text"));
    }

    fn write(&mut self, line: &str) {
        // One call, as the process is to read the line with one.
        self.input.write_all(format!("{line}\n").as_bytes()).expect("write to the process");
    }

    /// Reads the outcome of the last operation, and the message of its error.
    pub(super) fn outcome(&mut self) -> Result<(Outcome, String), String> {
        let line = after(OUTCOME, &mut self.output)?;
        Ok(serde_json::from_str(&line).expect("an outcome"))
    }

    /// Performs an operation while no other process performs one.
    pub(super) fn perform_alone(&mut self, operation: Operation) -> Result<(Outcome, String), String> {
        self.send(operation);
        while self.run_to_next_stop()? != Stop::Idle {}
        self.outcome()
    }

    /// Resumes the process, and waits for its next stop.
    pub(super) fn run_to_next_stop(&self) -> Result<Stop, String> {
        self.resume(None)?;
        self.next_stop()
    }

    fn resume(&self, signal: Option<Signal>) -> Result<(), String> {
        ptrace::cont(self.thread, signal).map_err(|errno| format!("resume a process: {errno}"))
    }

    fn next_stop(&self) -> Result<Stop, String> {
        loop {
            self.wait()?;
            let class = ptrace::getevent(self.thread).map_err(|errno| format!("read a stop: {errno}"))?;
            match u16::try_from(class).expect("a value of the filter") {
                system_calls::IDLE => return Ok(Stop::Idle),
                system_calls::SLEEP => return Ok(Stop::Sleep),
                // The call after a granted lease releases it. Another process that opens the file in between would wait in the
                // kernel.
                system_calls::LEASE => self.resume(None)?,
                _ => return Ok(Stop::Call),
            }
        }
    }

    /// Waits until the process has stopped before a system call.
    fn wait(&self) -> Result<(), String> {
        loop {
            let signal = match waitpid(self.thread, Some(WaitPidFlag::__WALL)) {
                Ok(WaitStatus::PtraceEvent(_, Signal::SIGTRAP, event))
                    if event == Event::PTRACE_EVENT_SECCOMP as i32 =>
                {
                    return Ok(());
                }
                Ok(WaitStatus::Stopped(_, signal)) => signal,
                other => return Err(format!("a process has ended, or did not stop in time: {other:?}")),
            };
            self.resume(Some(signal))?;
        }
    }

    /// Kills the process at the point where it has stopped.
    pub(super) fn kill(mut self) {
        self.child.kill().expect("kill the process");
        // The kernel reports the end of the process only after the end of its traced thread.
        while !matches!(
            waitpid(self.thread, Some(WaitPidFlag::__WALL)),
            Ok(WaitStatus::Signaled(..) | WaitStatus::Exited(..)) | Err(_)
        ) {}
        self.child.wait().expect("wait for the process");
    }
}

/// Starts a process in a mount namespace of its own. It inherits the namespace of a thread that enters a new one.
fn spawn_isolated() -> Child {
    let mut command = this_test_again(ROLE, "yes");
    in_namespace(|| command.stdin(Stdio::piped()).spawn().expect("a process"))
}

/// Returns the rest of the next line with this prefix.
fn after(prefix: &str, lines: &mut Lines<BufReader<ChildStdout>>) -> Result<String, String> {
    for line in lines.by_ref() {
        let line = line.expect("a line of a process");
        // libtest prints the name of the test without a newline before the first line.
        if let Some((_, rest)) = line.split_once(prefix) {
            return Ok(rest.to_owned());
        }
    }
    Err(format!("a process has ended without the line {prefix:?}"))
}
