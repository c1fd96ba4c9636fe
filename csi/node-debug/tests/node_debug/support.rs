//! A service in this process, and the program `dbg`.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Parser;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) const COMPONENT: &str = "agent";

/// The longest time that a test waits.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A node with a service.
pub(crate) struct Node {
    directory: TempDir,
    runtime: Runtime,
    serving: JoinHandle<anyhow::Result<()>>,
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
    /// Checks that the command failed with one line that has `text`.
    #[track_caller]
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
        let serving = runtime.spawn(node_debug::serve(args(directory.path(), options), stop.clone()));
        let node = Self { directory, runtime, serving, stop };
        let deadline = Instant::now() + TIMEOUT;
        while UnixStream::connect(node.socket()).is_err() {
            assert!(Instant::now() < deadline && !node.serving.is_finished(), "the service does not listen");
        }
        node
    }

    /// Starts a service with the same socket, which fails.
    pub(crate) fn start_another(&self, options: &[String]) -> String {
        let another = node_debug::serve(args(self.directory.path(), options), CancellationToken::new());
        format!("{:#}", self.runtime.block_on(another).unwrap_err())
    }

    pub(crate) fn stop(self) {
        let Self { directory, runtime, serving, stop } = self;
        stop.cancel();
        let ended = runtime.block_on(async { tokio::time::timeout(TIMEOUT, serving).await });
        ended.unwrap().unwrap().unwrap();
        drop(directory);
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("run/node-debug.sock")
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn append_log(&self, text: &str) {
        let path = self.directory.path().join("agent.log");
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        command(&self.socket(), args)
    }

    pub(crate) fn dbg(&self, args: &[&str]) -> Output {
        output(self.command(args))
    }
}

/// The options of a service with its files in `directory`.
fn args(directory: &Path, options: &[String]) -> node_debug::Args {
    let path = directory.display();
    let arguments = [
        "node-debug".to_owned(),
        format!("--socket={path}/run/node-debug.sock"),
        format!("--log={COMPONENT}={path}/agent.log"),
        "--driver-name=a.b".to_owned(),
        format!("--registration-dir={path}/plugins_registry"),
    ];
    node_debug::Args::parse_from(arguments.iter().chain(options))
}

/// Runs `dbg` with the socket of another program, or of none.
pub(crate) fn run(socket: &Path, args: &[&str]) -> Output {
    output(command(socket, args))
}

pub(crate) fn command(socket: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dbg"));
    command.arg("--socket").arg(socket).args(args);
    command
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
