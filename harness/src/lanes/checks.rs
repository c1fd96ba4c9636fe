//! Programs that check the sources and must succeed, each with a line of the progress.

use std::time::{Duration, Instant};

use anyhow::Result;
use testvm::process::{Finished, Program};
use testvm::report::Report;
use testvm::rust_build;
use testvm::session::Session;

/// Runs a command of cargo that may compile.
pub(super) async fn cargo(session: &Session, name: &str, args: &[&str]) -> (Result<Finished>, Duration) {
    let _turn = session.turn_to_compile().await;
    run(session, name, rust_build::program(session.workspace.root()).args(args.iter().copied())).await
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

/// Runs a program that must succeed, and adds it to the report.
pub(super) async fn check(session: &Session, suite: &str, report: &mut Report, name: &str, program: Program) {
    let (result, time) = run(session, name, program).await;
    report.record(suite, name, time, &result.and_then(must_succeed));
}

/// Returns an error with the output of the program if it failed.
pub(super) fn must_succeed(finished: Finished) -> Result<Finished> {
    anyhow::ensure!(finished.status.success(), "{}", finished.failure());
    Ok(finished)
}
