//! The driver's program in a process of its own, as in its pod.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Result;
use crate::support::Directories;

/// A running driver. Dropping it kills the process.
pub(crate) struct Process(Child);

impl Process {
    /// Starts the program with the options that the manifests give it. Its log is that of this program.
    pub(crate) fn start(program: &Path, directories: &Directories) -> Result<Process> {
        // The first word is the name of the program.
        let args = directories.command_line().into_iter().skip(1);
        let child = Command::new(program).args(args).stdout(Stdio::null()).spawn();
        Ok(Process(child.map_err(|error| format!("start {}: {error}", program.display()))?))
    }

    /// Stops the driver with SIGTERM.
    pub(crate) fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.0.id().try_into()?), Signal::SIGTERM)?;
        let status = self.0.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the driver ended with {status}").into()) }
    }
}

impl Drop for Process {
    /// Kills the process of a run that failed. A process that has ended is no error.
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
