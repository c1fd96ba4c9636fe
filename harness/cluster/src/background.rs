//! A cluster that outlives the command that started it.
//!
//! Every process of a cluster dies with its owner, so the owner must keep running. The command therefore runs
//! itself again in a session of its own. Both processes show progress on the same terminal, and the command
//! ends when the background process hands over a result. `down` later requests that the background process
//! stops.
//!
//! The background process locks the cluster's directory before it writes there. Another command that would start a
//! cluster in the same target directory fails with the process id and the checkout of the holder.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::Flock;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use testvm::cache::remove_file;
use testvm::session::{Session, Workspace};

use super::running::Cluster;

/// The variable of the project that is set in the background process; only its presence counts.
const MARK: &str = "HARNESS_BACKGROUND";
/// The name of the lock of the cluster's directory.
const LOCK: &str = "cluster";
/// The time for an orderly stop, which ends every guest and component in turn.
const STOP_DEADLINE: Duration = Duration::from_secs(60);
/// The poll interval for the end of the owner: only a parent can wait for a process.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Returns `true` in the background process.
pub fn is_background(session: &Session) -> bool {
    std::env::var_os(session.project.variable(MARK)).is_some()
}

/// Locks the directory of the background cluster for this process. A record there is of a process that has ended, so it is removed.
///
/// # Errors
/// Another process has a cluster there, or starts or stops one.
pub fn claim(session: &Session) -> Result<Flock<File>> {
    let command = session.project.command;
    let lock = session.try_exclusive(LOCK)?.map_err(|holder| {
        anyhow::anyhow!(
            "use {}: {holder} has a cluster there or is starting or stopping it; `{command} down` stops it once it is up, \
             and Ctrl-C before",
            directory(&session.workspace).display()
        )
    })?;
    remove_file(&path(&session.workspace))?;
    Ok(lock)
}

/// Runs this program again in the background, with these arguments, and returns the result that it hands
/// over. Ctrl-C stops the background process.
pub async fn run_again<T>(session: &Session, args: Vec<OsString>) -> Result<T>
where
    T: DeserializeOwned + Send + 'static,
{
    // The background process locks the directory itself. This check reports the conflict before anything is started.
    drop(claim(session)?);
    let program = std::env::current_exe().context("find this program's own file")?;
    // setsid: neither a closing terminal nor Ctrl-C after the hand-over may signal the background process.
    let mut child = Command::new("setsid")
        .arg(program)
        .args(args)
        .env(session.project.variable(MARK), "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("start the background process (by setsid, of util-linux)")?;
    let pid = Pid::from_raw(child.id().cast_signed());
    let stdout = child.stdout.take().context("the background process has no output")?;
    let line = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).map(|_| line)
    });
    let mut line = std::pin::pin!(line);
    let line = tokio::select! {
        line = &mut line => line,
        () = session.cancel.cancelled() => {
            // The background process stops by itself, and its end closes the pipe.
            kill(pid, Signal::SIGTERM).context("stop the background process")?;
            line.await
        }
    }
    .context("read from the background process")??;
    if line.is_empty() {
        let status = child.wait().context("wait for the background process")?;
        anyhow::bail!("the background process ended with {status} before the cluster was up; see above");
    }
    serde_json::from_str(&line).with_context(|| format!("the background process said {line:?}"))
}

/// Sends the result to the waiting command, and redirects the output of this process from the terminal to a
/// log. From then on this process alone owns the cluster. Without a cluster, the process is about to end.
pub fn hand_over<T: Serialize>(workspace: &Workspace, cluster: Option<&Cluster>, result: &T) -> Result<()> {
    let dir = directory(workspace);
    fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    if let Some(cluster) = cluster {
        let (pid, kubectl) = (nix::unistd::getpid().as_raw(), cluster.kubectl().to_owned());
        Owner { pid, kubeconfig: cluster.kubeconfig(), kubectl }.record(workspace)?;
    }
    let line = serde_json::to_string(result)?;
    let log = dir.join("background.log");
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&log)
        .with_context(|| format!("open {}", log.display()))?;
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).context("hand over to the waiting command")?;
    nix::unistd::dup2_stdout(&log).context("redirect standard output")?;
    nix::unistd::dup2_stderr(&log).context("redirect standard error")?;
    Ok(())
}

/// Returns the directory of the state of the background cluster.
pub fn directory(workspace: &Workspace) -> PathBuf {
    workspace.target().join("cluster")
}

/// The owner of the background cluster. It holds the lock of the directory until it ends, so its process id is not reused before.
#[derive(Debug, Deserialize, Serialize)]
pub struct Owner {
    pid: i32,
    /// The administrator's kubeconfig.
    pub kubeconfig: PathBuf,
    /// A kubectl of the cluster's version.
    pub kubectl: PathBuf,
}

impl Owner {
    /// Returns the owner of the cluster that is up, or `None` if there is none.
    ///
    /// # Errors
    /// Its record cannot be read.
    pub fn running(session: &Session) -> Result<Option<Owner>> {
        if let Ok(_lock) = session.try_exclusive(LOCK)? {
            remove_file(&path(&session.workspace))?;
            return Ok(None);
        }
        Owner::read(&session.workspace)
    }

    fn read(workspace: &Workspace) -> Result<Option<Owner>> {
        let path = path(workspace);
        match fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map(Some).with_context(|| format!("parse {}", path.display()))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        }
    }

    fn record(&self, workspace: &Workspace) -> Result<()> {
        let path = path(workspace);
        let beside = path.with_extension("new");
        fs::write(&beside, serde_json::to_vec_pretty(self)?)
            .and_then(|()| fs::rename(&beside, &path))
            .with_context(|| format!("write {}", path.display()))
    }

    /// Requests that the owner stops the cluster, and waits for its end. Kills the owner if it exceeds the
    /// deadline.
    ///
    /// # Errors
    /// The owner cannot be signalled, or the lock cannot be read.
    pub async fn stop(&self, session: &Session) -> Result<()> {
        let asked = Instant::now();
        self.signal(Signal::SIGTERM)?;
        let _lock = loop {
            if let Ok(lock) = session.try_exclusive(LOCK)? {
                break lock;
            }
            // Without a record, or with that of another, the cluster began after the end of this one.
            if Owner::read(&session.workspace)?.is_none_or(|owner| owner.pid != self.pid) {
                return Ok(());
            }
            if asked.elapsed() > STOP_DEADLINE {
                // The kernel kills the owner's processes with it.
                self.signal(Signal::SIGKILL)?;
            }
            tokio::time::sleep(EXIT_POLL_INTERVAL).await;
        };
        remove_file(&path(&session.workspace))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        match kill(Pid::from_raw(self.pid), signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(errno) => Err(errno).with_context(|| format!("send {signal} to process {}", self.pid)),
        }
    }
}

fn path(workspace: &Workspace) -> PathBuf {
    directory(workspace).join("owner.json")
}
