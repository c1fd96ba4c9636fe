//! A process that performs operations, stopped before and after each of its system calls (ptrace(2)).
//!
//! Only one process runs at a time, and the test decides which one, so a plan has the same interleaving of system calls in each
//! run. No process waits in the kernel for another one: the store tries its locks at intervals, and a process is not stopped
//! while it holds a lease.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::operation::{Operation, Outcome};
use super::worker::{NEW, OUTCOME, READY, ROLE};
use crate::environment::this_test_again;

pub(super) struct Process {
    child: Child,
    /// The thread that performs operations.
    thread: Pid,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    /// True between the stops before and after a system call.
    in_call: bool,
    holds_lease: bool,
}

/// Why a process has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Before or after a system call.
    Call,
    /// Before it sleeps, because another process holds a lock.
    Sleep,
    /// Before it reads the next operation.
    Idle,
}

impl Process {
    /// Starts a process, and stops it before it reads the first operation.
    pub(super) fn start() -> Result<Self, String> {
        let mut child = this_test_again(ROLE, NEW).stdin(Stdio::piped()).spawn().expect("a process");
        let input = child.stdin.take().expect("its input");
        let mut output = BufReader::new(child.stdout.take().expect("its output")).lines();
        let thread = after(READY, &mut output).expect("the process is ready").parse().expect("a thread id");
        let mut process =
            Self { child, thread: Pid::from_raw(thread), input, output, in_call: false, holds_lease: false };
        ptrace::seize(process.thread, Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_EXITKILL)
            .expect("trace the process");
        ptrace::interrupt(process.thread).expect("interrupt the process");
        process.wait()?;
        while process.resume()? != Stop::Idle {}
        Ok(process)
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Passes an operation to an idle process, which performs it when it is resumed.
    pub(super) fn send(&mut self, operation: Operation) {
        let line = serde_json::to_string(&operation).expect("an operation as text");
        writeln!(self.input, "{line}").expect("write to the process");
    }

    /// Reads the outcome of the last operation, and the message of its error.
    pub(super) fn outcome(&mut self) -> Result<(Outcome, String), String> {
        let line = after(OUTCOME, &mut self.output)?;
        Ok(serde_json::from_str(&line).expect("an outcome"))
    }

    /// Resumes the process until its next stop.
    pub(super) fn resume(&mut self) -> Result<Stop, String> {
        loop {
            ptrace::syscall(self.thread, None).map_err(|errno| format!("resume a process: {errno}"))?;
            self.wait()?;
            self.in_call = !self.in_call;
            let stop = if self.in_call { self.begun_call() } else { Stop::Call };
            if !self.holds_lease || stop != Stop::Call {
                return Ok(stop);
            }
        }
    }

    /// Waits until the process has stopped at a system call, or has been interrupted.
    fn wait(&self) -> Result<(), String> {
        loop {
            let signal = match waitpid(self.thread, Some(WaitPidFlag::__WALL)) {
                Ok(WaitStatus::PtraceSyscall(_)) => return Ok(()),
                Ok(WaitStatus::PtraceEvent(_, Signal::SIGTRAP, _)) => return Ok(()),
                Ok(WaitStatus::Stopped(_, signal)) => signal,
                other => return Err(format!("a process has ended, or did not stop in time: {other:?}")),
            };
            ptrace::syscall(self.thread, signal).map_err(|errno| format!("resume a process: {errno}"))?;
        }
    }

    /// Classifies the system call that the process has begun.
    fn begun_call(&mut self) -> Stop {
        let (number, arguments) = system_call(self.thread);
        match (number, arguments) {
            (libc::SYS_read, [0, ..]) => Stop::Idle,
            (libc::SYS_nanosleep | libc::SYS_clock_nanosleep, _) => Stop::Sleep,
            (libc::SYS_fcntl, [_, command, argument]) if command == libc::F_SETLEASE as u64 => {
                self.holds_lease = argument != libc::F_UNLCK as u64;
                Stop::Call
            }
            _ => Stop::Call,
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

/// Returns the number of the system call that a thread has begun, and its first three arguments.
#[cfg(target_arch = "x86_64")]
fn system_call(thread: Pid) -> (i64, [u64; 3]) {
    let registers = ptrace::getregs(thread).expect("the registers of a stopped thread");
    (registers.orig_rax.cast_signed(), [registers.rdi, registers.rsi, registers.rdx])
}

/// Returns the number of the system call that a thread has begun, and its first three arguments.
#[cfg(target_arch = "aarch64")]
fn system_call(thread: Pid) -> (i64, [u64; 3]) {
    let registers = ptrace::getregs(thread).expect("the registers of a stopped thread").regs;
    (registers[8].cast_signed(), [registers[0], registers[1], registers[2]])
}
