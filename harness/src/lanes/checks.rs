//! Programs that check the sources and must succeed, each with a line of the progress.

use std::time::{Duration, Instant};

use anyhow::Result;
use testvm::process::{Finished, Program};
use testvm::report::Report;
use testvm::rust_build;
use testvm::session::Session;

/// The suite of these checks in the report.
pub(super) const SUITE: &str = "unit";

/// Runs a command of cargo that must succeed and may compile, and adds it to the report. `args` are separated by spaces. Returns `true`
/// if it succeeded.
pub(super) async fn cargo(session: &Session, report: &mut Report, name: &str, args: &str) -> bool {
    let _turn = session.turn_to_compile().await;
    let program = rust_build::program(session.workspace.root()).args(args.split(' '));
    check(session, report, name, program).await
}

/// Runs a program of the unit lane, and returns how it ended and its duration.
pub(super) async fn run(session: &Session, name: &str, program: Program) -> (Result<Finished>, Duration) {
    let step = session.progress.step(format!("unit: {name}"));
    let program = program.on_stderr_line(step.line_notes());
    let started = Instant::now();
    let result = session.until_cancelled(program.finish()).await;
    match &result {
        Ok(finished) if finished.status.success() => step.done(""),
        Ok(finished) => step.failed(finished.status.to_string()),
        Err(_) => drop(step),
    }
    (result, started.elapsed())
}

/// Runs a program that must succeed, adds it to the report, and returns `true` if it succeeded.
pub(super) async fn check(session: &Session, report: &mut Report, name: &str, program: Program) -> bool {
    let (result, time) = run(session, name, program).await;
    let result = result.and_then(|finished| ended(&finished).map_err(anyhow::Error::msg));
    report.record(SUITE, name, time, &result);
    result.is_ok()
}

/// Returns an error with the output of the program if it failed.
pub(super) fn ended(finished: &Finished) -> Result<(), String> {
    if finished.status.success() { Ok(()) } else { Err(finished.failure()) }
}
