//! The processes of the guest. PID 1 inherits every orphan, so one thread reaps all processes. It passes the
//! status of a child that this program started to the thread that waits for it.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

use super::log_file::LogFile;
use super::report::End;
use super::reporter::Reporter;

pub(super) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// All children of PID 1.
#[derive(Clone, Debug)]
pub(super) struct Children(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    running: HashSet<Pid>,
    ended: HashMap<Pid, WaitStatus>,
}

/// How the output of a child is handled.
pub(super) enum Output {
    /// Each line is reported under the child's name, and appended to the file if there is one.
    Log(Reporter, Option<LogFile>),
    /// The output is kept for [`Child::output`].
    Capture,
}

/// A child process in a process group of its own.
#[derive(Debug)]
pub(super) struct Child {
    pid: Pid,
    children: Children,
    readers: [JoinHandle<Vec<u8>>; 2],
}

impl Children {
    /// Starts the thread that reaps processes.
    pub(super) fn new() -> Children {
        let children = Children(Arc::default());
        let shared = Arc::clone(&children.0);
        std::thread::spawn(move || shared.reap_forever());
        children
    }

    /// Starts a program, with `name` as its name in the log.
    pub(super) fn spawn(&self, name: &str, mut command: Command, output: Output) -> io::Result<Child> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        // The reaper takes this lock before it reaps. It therefore finds the child registered. If exec fails,
        // the standard library itself waits for the child, and the reaper must not reap it.
        let mut state = self.0.lock();
        let mut child = command.spawn()?;
        let pid = Pid::from_raw(child.id().cast_signed());
        state.running.insert(pid);
        drop(state);
        self.0.changed.notify_all();

        let stdout = child.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
        let stderr = child.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>);
        let log = match output {
            Output::Log(reporter, file) => Some((reporter, Arc::new(Mutex::new(file)))),
            Output::Capture => None,
        };
        let readers = [stdout, stderr].map(|pipe| read(name, pipe, log.clone()));
        Ok(Child { pid, children: self.clone(), readers })
    }

    /// Runs a program with `input` until it ends. Kills it after `timeout`.
    pub(super) fn run(
        &self,
        name: &str,
        mut command: Command,
        input: &str,
        output: Output,
        timeout: Duration,
    ) -> io::Result<(End, Vec<u8>, Vec<u8>)> {
        command.stdin(input_file(input)?);
        let child = self.spawn(name, command, output)?;
        let end = child.wait_timeout(timeout).unwrap_or_else(|| {
            child.kill();
            End::TimedOut
        });
        let [stdout, stderr] = child.output();
        Ok((end, stdout, stderr))
    }
}

impl Child {
    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns how the child ended, or `None` if it still runs after `timeout`.
    pub(super) fn wait_timeout(&self, timeout: Duration) -> Option<End> {
        let deadline = Instant::now() + timeout;
        let mut state = self.children.0.lock();
        loop {
            if let Some(status) = state.ended.get(&self.pid) {
                return Some(end_of(*status));
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            state = self.children.0.wait(state, left);
        }
    }

    pub(super) fn wait(&self) -> End {
        loop {
            if let Some(end) = self.wait_timeout(Duration::from_secs(3600)) {
                return end;
            }
        }
    }

    fn kill(&self) {
        // ESRCH: it has ended already.
        killpg(self.pid, Signal::SIGKILL).ok();
        self.wait();
    }

    /// Returns the captured standard output and standard error. Call it after the child has ended: when the
    /// leader of the process group ends, the whole group is killed, so that no process holds the pipes open.
    pub(super) fn output(self) -> [Vec<u8>; 2] {
        self.children.0.lock().ended.remove(&self.pid);
        self.readers.map(|reader| reader.join().unwrap_or_default())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, timeout: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner).0
    }

    fn reap_forever(&self) {
        loop {
            match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
                Ok(status) => self.reap(status.pid()),
                Err(Errno::ECHILD) => {
                    let state = self.lock();
                    if state.running.is_empty() {
                        drop(self.wait(state, Duration::from_secs(1)));
                    }
                }
                Err(_) => {}
            }
        }
    }

    fn reap(&self, pid: Option<Pid>) {
        let Some(pid) = pid else { return };
        let mut state = self.lock();
        let ours = state.running.contains(&pid);
        if ours {
            // While the leader is a zombie, the kernel does not reuse its group id.
            killpg(pid, Signal::SIGKILL).ok();
        }
        let Ok(status) = waitpid(pid, Some(WaitPidFlag::WNOHANG)) else { return };
        if ours && status != WaitStatus::StillAlive {
            state.running.remove(&pid);
            state.ended.insert(pid, status);
            self.changed.notify_all();
        }
    }
}

fn end_of(status: WaitStatus) -> End {
    match status {
        WaitStatus::Exited(_, code) => End::Exited(code),
        WaitStatus::Signaled(_, signal, _) => End::Signalled(signal.as_str().to_owned()),
        other => End::Signalled(format!("{other:?}")),
    }
}

/// The log of a child, which the readers of its standard output and standard error share.
type Log = (Reporter, Arc<Mutex<Option<LogFile>>>);

fn read(name: &str, pipe: Option<Box<dyn Read + Send>>, log: Option<Log>) -> JoinHandle<Vec<u8>> {
    let name = name.to_owned();
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        let Some(mut pipe) = pipe else { return kept };
        match log {
            // Keeps the output that was read before an error.
            None => drop(pipe.read_to_end(&mut kept)),
            Some((reporter, file)) => {
                let mut lines = BufReader::new(pipe);
                while matches!(lines.read_until(b'\n', &mut kept), Ok(count) if count > 0) {
                    reporter.log(&name, String::from_utf8_lossy(&kept).trim_end());
                    // A disk that is full is no reason to end the program. The host has the line.
                    let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                    if file.as_mut().is_some_and(|file| file.append(&kept).is_err()) {
                        *file = None;
                    }
                    drop(file);
                    kept.clear();
                }
            }
        }
        kept
    })
}

/// Passes the input in a file, so that no thread has to write to a pipe.
fn input_file(input: &str) -> io::Result<Stdio> {
    if input.is_empty() {
        return Ok(Stdio::null());
    }
    let name = c"input";
    let descriptor = nix::sys::memfd::memfd_create(name, nix::sys::memfd::MFdFlags::MFD_CLOEXEC)?;
    let mut file = std::fs::File::from(descriptor);
    file.write_all(input.as_bytes())?;
    io::Seek::rewind(&mut file)?;
    Ok(file.into())
}

/// Returns a command with a plain environment, because PID 1 has the one of the kernel.
pub(super) fn command(argv: &[String]) -> Result<Command> {
    let (program, args) = argv.split_first().context("an empty command line")?;
    let mut command = Command::new(program);
    command.args(args).env_clear().env("PATH", PATH).env("HOME", "/root").current_dir("/");
    Ok(command)
}
