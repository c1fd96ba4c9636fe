//! A driver in a process of its own, to be killed.

use std::process::{Child, Command, ExitStatus, Stdio};

use clap::Parser;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::Directories;

/// Set where this program is to be a driver: its command line, one argument to a line.
const COMMAND_LINE: &str = "LOOPFS_TEST_DRIVER";

pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(directories: &Directories) -> Self {
        Self::start_logging_to(directories, Stdio::inherit())
    }

    pub(crate) fn start_logging_to(directories: &Directories, log: impl Into<Stdio>) -> Self {
        // The test below, which is a driver when asked to be.
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "driver_process::a_driver_is_a_process_that_ends_when_it_is_asked",
                "--nocapture",
            ])
            .env(COMMAND_LINE, directories.command_line().join("\n"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self(child)
    }

    pub(crate) fn signal(mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.0.id().try_into().unwrap()), signal).unwrap();
        self.0.wait().unwrap()
    }
}

impl Drop for Process {
    /// For a test that fails half-way.
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn a_driver_is_a_process_that_ends_when_it_is_asked() {
    if let Some(command_line) = std::env::var_os(COMMAND_LINE) {
        let args = csi::Args::parse_from(command_line.to_str().unwrap().lines());
        args.log.init();
        tokio::runtime::Runtime::new().unwrap().block_on(csi::run(args)).unwrap();
        return;
    }
    let scene = crate::scene::Scene::without_driver();
    let process = Process::start(&scene.directories);
    crate::support::Client::connect(&scene.directories.endpoint).wait_until_ready();
    assert!(process.signal(Signal::SIGTERM).success());
    scene.finish();
}
