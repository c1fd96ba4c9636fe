//! `bench loop`: loop devices and project ids, compared with the bare system calls and the methods of other
//! programs.

use std::fs::OpenOptions;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::process::{Program, tail};
use testvm::rust_build;
use testvm::session::Session;

use super::guest;
use super::measurement::{Environment, Measurements};
use super::outcome::{self, Args, Outcome};
use super::plot::Plot;
use super::threshold::{self, Threshold};

/// The time to detach and remove the devices of a run that was stopped.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(20);

const PLOTS: [Plot; 4] = [
    Plot::new(
        "Attach",
        "devices attached",
        &["floor_attach", "attach_pool", "attach_get_free", "losetup_attach"],
    ),
    Plot::new("Find the device of a file", "devices attached", &["find_device", "losetup_j"]),
    Plot::new("Detach", "devices attached", &["floor_detach", "detach"]),
    Plot::new("Allocate a project id", "ids in use", &["id_alloc", "id_gap_scan"]),
];

pub(super) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let program = session.until_cancelled(rust_build::bench(session, "loopfs", "loop")).await?;
    let mut parts = Vec::new();
    let mut in_guest = Vec::new();
    if has_loop_devices() {
        let directory = match &args.dir {
            Some(directory) => directory.clone(),
            None => outcome::directory(session)?,
        };
        let args = args.of_program(&["devices", &directory.display().to_string()]);
        parts.push(run_here(session, &program, args).await?);
    } else {
        session
            .progress
            .line("this user or machine has no loop devices: they are measured in the virtual machine");
        in_guest.push(args.of_program(&["devices", guest::XFS]));
    }
    in_guest.push(args.of_program(&["ids", guest::XFS]));
    parts.extend(
        guest::run(session, args.kernel.as_deref(), &program, Vec::new(), &in_guest, guest::DISK_MIB).await?,
    );
    Ok(Outcome::new(parts, thresholds, &PLOTS))
}

/// Returns `true` for root on a kernel with `/dev/loop-control`.
fn has_loop_devices() -> bool {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control");
    nix::unistd::geteuid().is_root() && control.is_ok()
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
async fn run_here(session: &Session, program: &Path, args: Vec<String>) -> Result<Environment> {
    let step = session.progress.step("measure on this machine");
    let notes = step.notes();
    let log = outcome::directory(session)?.join("here.log");
    match std::fs::remove_file(&log) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let mut process = with_realtime_priority(program)
        .await
        .args(args)
        .log(&log)
        .on_stderr_line(move |line| notes.note(line.to_owned()))
        .spawn()?;
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

/// Returns the thresholds for every count that was measured.
fn thresholds(all: &Measurements) -> Vec<Threshold> {
    let mut thresholds = Vec::new();
    for n in all.counts("attach_pool") {
        // The calls that an attachment with read-back cannot omit take 1.16 to 1.20 times as long as the bare
        // two calls.
        let text = format!("attach, warm pool, {n} attached: within 1.3 times the bare calls");
        thresholds.push(threshold::at_most(all, &text, ("attach_pool", n), 1.3, ("floor_attach", n)));
    }
    thresholds.push(threshold::flat(all, "attach, warm pool: flat within 1.3 times", "attach_pool", 1.3));
    let most = all.counts("attach_pool").last().copied().unwrap_or_default();
    let text = format!("the device of a file, {most} attached: 1000 times as fast as losetup -j");
    thresholds.push(threshold::faster(all, &text, ("find_device", most), 1000.0, ("losetup_j", most)));
    thresholds.push(threshold::flat(
        all,
        "the device of a file: constant within 1.5 times",
        "find_device",
        1.5,
    ));
    for n in all.counts("detach") {
        let text = format!("detach, {n} attached: under twice the bare calls");
        thresholds.push(threshold::at_most(all, &text, ("detach", n), 2.0, ("floor_detach", n)));
    }
    let text =
        format!("{most} devices detached and removed in the background: 20 times as fast as one by one");
    thresholds.push(threshold::faster(
        all,
        &text,
        ("remove_background", most),
        20.0,
        ("remove_serial", most),
    ));
    thresholds.push(threshold::flat(all, "project id allocation: flat within 1.5 times", "id_alloc", 1.5));
    thresholds
}
