//! Runs a benchmark of loop devices on this machine, if its kernel and the user's rights suffice.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::process::{Program, tail};
use testvm::session::Session;

use super::measurement::Environment;
use super::outcome::{self, Args};

/// The time to detach and remove the devices of a run that was stopped.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns `true` for root on a kernel with `/dev/loop-control`.
pub(super) fn has_loop_devices() -> bool {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control");
    nix::unistd::geteuid().is_root() && control.is_ok()
}

/// Returns the directory of the backing files: that of the command line, or one below cargo's target
/// directory.
pub(super) fn files(session: &Session, args: &Args) -> Result<PathBuf> {
    match &args.dir {
        Some(directory) => Ok(directory.clone()),
        None => outcome::directory(session),
    }
}

/// Runs the program with a real-time priority if the user may set it, because other load on the machine would
/// affect the measurements.
async fn with_realtime_priority(program: &Path) -> Program {
    let priority = ["--fifo", "50"];
    match Program::new("chrt").args(priority).arg("true").run().await {
        Ok(_) => Program::new("chrt").args(priority).arg(program).named("loop"),
        Err(_) => Program::new(program),
    }
}

/// Runs the program on this machine. It handles signals itself and removes its devices if the run is stopped.
pub(super) async fn run(
    session: &Session,
    program: &Path,
    args: Vec<String>,
    env: &[(&str, OsString)],
) -> Result<Environment> {
    let step = session.progress.step("measure on this machine");
    let notes = step.notes();
    let log = outcome::directory(session)?.join("here.log");
    match std::fs::remove_file(&log) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let program = with_realtime_priority(program).await.args(args).log(&log);
    let program = env.iter().fold(program, |program, (name, value)| program.env(name, value));
    let mut process = program.on_stderr_line(move |line| notes.note(line.to_owned())).spawn()?;
    let Some(status) = session.cancel.run_until_cancelled(process.wait()).await else {
        process.stop(CLEAN_UP_TIMEOUT).await?;
        anyhow::bail!("stopped before it ended");
    };
    let output = std::fs::read_to_string(&log).with_context(|| format!("read {}", log.display()))?;
    let status = status?;
    anyhow::ensure!(status.success(), "the benchmark ended with {status}:\n{}", tail(&output, 10));
    step.done("");
    Environment::parse("this machine", &output)
}
