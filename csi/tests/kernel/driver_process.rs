//! A driver in a process of its own, so that tests can kill it.

use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use clap::Parser;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio_util::sync::CancellationToken;

use crate::support::{Client, Directories};

/// If this variable is set, this program runs as a driver with this command line, one argument per line.
const COMMAND_LINE: &str = "LOOPFS_TEST_DRIVER";

pub(crate) struct Process {
    child: Child,
    endpoint: PathBuf,
    ended: CancellationToken,
}

impl Process {
    pub(crate) fn start(directories: &Directories) -> Self {
        Self::start_logging_to(directories, Stdio::inherit())
    }

    pub(crate) fn start_logging_to(directories: &Directories, log: impl Into<Stdio>) -> Self {
        // The test below, which runs as a driver if the variable is set.
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "driver_process::a_driver_process_stops_on_sigterm", "--nocapture"])
            .env(COMMAND_LINE, directories.command_line().join("\n"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, endpoint: directories.endpoint.clone(), ended: CancellationToken::new() }
    }

    /// Starts a driver, and returns it with a client when it is ready.
    pub(crate) fn start_ready(directories: &Directories) -> (Self, Client) {
        let process = Self::start(directories);
        let client = process.connect();
        client.wait_until_ready();
        (process, client)
    }

    /// Kills the driver.
    pub(crate) fn kill(self, client: Client) {
        self.signal(Signal::SIGKILL);
        drop(client);
    }

    /// Stops the driver as the kubelet does.
    pub(crate) fn stop(self, client: Client) {
        drop(client);
        assert!(self.signal(Signal::SIGTERM).success());
    }

    /// Returns a client that detects the end of the process.
    pub(crate) fn connect(&self) -> Client {
        Client::connect_until(&self.endpoint, self.ended())
    }

    /// Cancelled when the process has ended.
    pub(crate) fn ended(&self) -> CancellationToken {
        self.ended.clone()
    }

    pub(crate) fn signal(self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
        self.wait()
    }

    /// Waits until the process has ended.
    pub(crate) fn wait(mut self) -> ExitStatus {
        let status = self.child.wait().unwrap();
        self.ended.cancel();
        status
    }
}

impl Drop for Process {
    /// Kills the process of a failed test.
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn a_driver_process_stops_on_sigterm() {
    if let Some(command_line) = std::env::var_os(COMMAND_LINE) {
        let args = csi::Args::parse_from(command_line.to_str().unwrap().lines());
        let exit = service::run(&args.log.clone(), |stop| csi::serve(args, stop));
        assert_eq!(exit, ExitCode::SUCCESS);
        return;
    }
    let fixture = crate::fixture::Fixture::without_driver();
    let process = Process::start(&fixture.directories);
    process.connect().wait_until_ready();
    fixture.directories.wait_for_registration_socket();
    let sockets = [fixture.directories.endpoint.clone(), fixture.directories.registration_socket()];
    assert!(sockets.iter().all(|socket| socket.exists()));
    assert!(process.signal(Signal::SIGTERM).success());
    assert!(!sockets.iter().any(|socket| socket.exists()));
    fixture.finish();
}
