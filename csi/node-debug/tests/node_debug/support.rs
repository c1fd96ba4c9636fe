//! A service in this process, and the program `dbg`.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Parser;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

pub(crate) const COMPONENT: &str = "agent";

/// The longest time that a test waits.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A node with a service.
pub(crate) struct Node {
    directory: TempDir,
    runtime: Runtime,
    running: node_debug::RunningService,
    stop: CancellationToken,
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Output {
    /// Checks that the command failed with one line that contains this text.
    pub(crate) fn assert_failed(&self, text: &str) {
        assert_eq!(self.code, Some(3), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("dbg: ") && self.stderr.contains(text), "{self:?}");
    }
}

impl Node {
    pub(crate) fn start(options: &[String]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let stop = CancellationToken::new();
        let running = runtime.block_on(start(directory.path(), options, stop.clone())).unwrap();
        Self { directory, runtime, running, stop }
    }

    /// Starts a service with the same socket.
    pub(crate) fn start_another(&self) -> Result<(), String> {
        let started = self.runtime.block_on(start(self.directory.path(), &[], CancellationToken::new()));
        started.map(drop).map_err(|error| format!("{error:#}"))
    }

    pub(crate) fn stop(self) {
        let Self { directory, runtime, running, stop } = self;
        stop.cancel();
        runtime.block_on(async { tokio::time::timeout(TIMEOUT, running.finished()).await }).unwrap().unwrap();
        drop(directory);
    }

    pub(crate) fn socket(&self) -> PathBuf {
        socket(self.directory.path())
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn tcp(&self) -> SocketAddr {
        self.running.address.unwrap()
    }

    pub(crate) fn append_log(&self, text: &str) {
        let path = self.directory.path().join("agent.log");
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    /// Writes to the log, and waits until the service has read it.
    pub(crate) fn write_log(&self, text: &str) {
        self.append_log(text);
        let expected = format!(" {} lines", text.lines().count());
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let listed = self.dbg(&["logs"]);
            if listed.stdout.contains(&expected) {
                return;
            }
            assert!(Instant::now() < deadline, "the service has not read the log: {listed:?}");
        }
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = dbg();
        command.arg("--address").arg(format!("unix://{}", self.socket().display())).args(args);
        command
    }

    pub(crate) fn dbg(&self, args: &[&str]) -> Output {
        output(self.command(args))
    }
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("run/node-debug.sock")
}

/// Starts a service with its files in `directory`.
pub(crate) async fn start(
    directory: &Path,
    options: &[String],
    stop: CancellationToken,
) -> anyhow::Result<node_debug::RunningService> {
    let path = directory.display();
    let arguments = [
        "node-debug".to_owned(),
        format!("--socket={path}/run/node-debug.sock"),
        format!("--log={COMPONENT}={path}/agent.log"),
        "--driver-name=a.b".to_owned(),
        format!("--registration-dir={path}/plugins_registry"),
    ];
    let args = node_debug::Args::try_parse_from(arguments.iter().chain(options))?;
    node_debug::RunningService::start(args, stop).await
}

pub(crate) fn dbg() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dbg"));
    for variable in ["ADDRESS", "TLS_CERT", "TLS_KEY", "SERVER_CA"] {
        command.env_remove(format!("NODE_DEBUG_{variable}"));
    }
    command
}

pub(crate) fn run(args: &[&str]) -> Output {
    let mut command = dbg();
    command.args(args);
    output(command)
}

fn output(mut command: Command) -> Output {
    let output = command.output().unwrap();
    Output {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

pub(crate) fn write(path: &Path, text: &str) -> String {
    fs::write(path, text).unwrap();
    path.display().to_string()
}
