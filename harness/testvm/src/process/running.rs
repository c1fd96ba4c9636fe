//! A running child. The thread that started it waits for it, and it gets signals only until it is reaped.

use std::fs::File;
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use tokio::sync::watch;

use super::output::{LineSink, Output, tee_lines};

/// A running child process. Dropping it kills its process group and reaps it.
#[derive(Debug)]
pub struct Process {
    pub(super) name: String,
    group: Pid,
    reaped: Arc<Mutex<bool>>,
    exit: watch::Receiver<Option<ExitStatus>>,
    waiter: Option<JoinHandle<()>>,
    pub(super) output: Output,
}

impl Process {
    pub(super) fn start(
        name: String,
        command: Command,
        tee: Option<(LineSink, File)>,
        output: Output,
    ) -> Result<Process> {
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let (ended, exit) = watch::channel(None);
        let reaped = Arc::new(Mutex::new(false));
        let waiter = std::thread::Builder::new()
            .name(format!("wait {name}"))
            .spawn({
                let reaped = Arc::clone(&reaped);
                move || own_child(command, tee, &started, &reaped, &ended)
            })
            .context("start a thread")?;
        let pid = start
            .recv()
            .context("the thread that starts a process ended")?
            .with_context(|| format!("start {name} (by setpriv, of util-linux)"))?;
        let group = Pid::from_raw(i32::try_from(pid).context("a pid beyond i32")?);
        Ok(Process { name, group, reaped, exit, waiter: Some(waiter), output })
    }

    /// Returns the program's name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the process id, which is also that of the process group.
    pub fn id(&self) -> i32 {
        self.group.as_raw()
    }

    /// Returns the exit status, or `None` if the child still runs.
    #[must_use]
    pub fn try_wait(&self) -> Option<ExitStatus> {
        *self.exit.borrow()
    }

    /// Waits for the end of the child. It may be called repeatedly.
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        let status = self.exit.wait_for(Option::is_some).await;
        let status = status.with_context(|| format!("lost track of {}", self.name))?;
        status.with_context(|| format!("{} ended without a status", self.name))
    }

    /// Sends a signal to the process and all of its group. After the process was reaped, this has no effect.
    pub fn signal(&self, signal: Signal) {
        let reaped = self.reaped.lock().unwrap_or_else(PoisonError::into_inner);
        if !*reaped {
            // ESRCH is impossible: the lock ensures that the leader is not reaped yet.
            killpg(self.group, signal).ok();
        }
    }

    /// Sends SIGTERM, sends SIGKILL after `grace`, and reaps the process.
    pub async fn stop(mut self, grace: Duration) -> Result<ExitStatus> {
        self.end(grace).await
    }

    /// Ends the process like [`Process::stop`]. Its output can be read afterwards.
    pub(super) async fn end(&mut self, grace: Duration) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM);
        if let Ok(status) = tokio::time::timeout(grace, self.wait()).await {
            return status;
        }
        self.signal(Signal::SIGKILL);
        self.wait().await
    }
}

impl Drop for Process {
    /// Kills the group and reaps the child if the owner did not call [`Process::stop`].
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        if let Some(waiter) = self.waiter.take() {
            // A panic of the thread has been printed; a destructor cannot return it.
            drop(waiter.join());
        }
    }
}

fn own_child(
    mut command: Command,
    tee: Option<(LineSink, File)>,
    started: &std::sync::mpsc::SyncSender<std::io::Result<u32>>,
    reaped: &Mutex<bool>,
    ended: &watch::Sender<Option<ExitStatus>>,
) {
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return drop(started.send(Err(error))),
    };
    // Closes this process's copies of the child's descriptors.
    drop(command);
    let reader = tee.and_then(|(sink, copy)| {
        let pipe = child.stderr.take()?;
        Some(std::thread::spawn(move || tee_lines(pipe, sink, copy)))
    });
    let pid = child.id();
    drop(started.send(Ok(pid)));

    let group = Pid::from_raw(pid.cast_signed());
    // Leaves the zombie in place, so that the kernel cannot reuse its group id before the kill below.
    while waitid(Id::Pid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) == Err(Errno::EINTR) {}
    let mut reaped = reaped.lock().unwrap_or_else(PoisonError::into_inner);
    killpg(group, Signal::SIGKILL).ok();
    let status = child.wait();
    *reaped = true;
    drop(reaped);
    if let Some(reader) = reader {
        drop(reader.join());
    }
    if let Ok(status) = status {
        ended.send_replace(Some(status));
    }
}
