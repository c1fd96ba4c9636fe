//! Runs the benchmarks of a command line, writes the report, and compares it with an earlier one.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use testvm::session::Session;

use super::args::Args;
use super::comparison::Comparison;
use super::report;
use super::results::{BenchResults, Results, directory};
use super::threshold::Threshold;
use crate::listing::record_time;

/// Runs one benchmark or all, prints their tables and writes the report. With the options for it, it only
/// compares earlier runs.
///
/// # Errors
/// The only benchmark does not complete, it has no such option, or a file cannot be read or written.
pub async fn run(session: &Session, args: &Args) -> Result<ExitCode> {
    args.check()?;
    // Before anything is measured: a wrong path should not cost a run, and the run may overwrite the file.
    let old = Results::read(&args.compare)?;
    let recorded = Results::read(&args.results)?;
    if let (Some(old), Some(new)) = (&old, &recorded) {
        let comparison = Comparison::of(old, new, args.factor);
        print!("{}", report::changes(&comparison));
        return Ok(exit_code(!comparison.has_worse()));
    }

    // Two runs would disturb each other, and write the same files.
    let _lock = session.exclusive("bench").await?;
    let json = directory(session)?.join("report.json");
    let results = Box::pin(measure(session, args, &json)).await?;
    session.progress.finish();
    let comparison = old.map(|old| Comparison::of(&old, &results, args.factor));
    let mut text = report::text(&results);
    text += &comparison.as_ref().map(report::changes).unwrap_or_default();
    let path = json.with_extension("txt");
    write(&path, &text)?;

    let thresholds: Vec<&Threshold> = results.benches.iter().flat_map(|bench| &bench.thresholds).collect();
    let failed = results.benches.iter().filter(|bench| bench.error.is_some());
    let failed: Vec<&str> = failed.map(|bench| bench.name.as_str()).collect();
    println!("{text}\n{}\n{}\n{}", json.display(), path.display(), report::verdict(&thresholds, &failed));
    let all_met = thresholds.iter().all(|threshold| threshold.is_met == Some(true));
    let is_worse = comparison.is_some_and(|comparison| comparison.has_worse());
    Ok(exit_code(failed.is_empty() && !is_worse && (all_met || !args.check)))
}

/// Runs the benchmarks, and writes the results into both files after each one.
async fn measure(session: &Session, args: &Args, json: &Path) -> Result<Results> {
    let benches = args.benches();
    let commit = commit(session.workspace.root()).await;
    let mut results = Results { commit, quick: args.quick, benches: Vec::new() };
    for (number, bench) in benches.iter().enumerate() {
        let name = bench.name();
        let step = session.progress.step(format!("benchmark {name}, {} of {}", number + 1, benches.len()));
        let mut result = BenchResults { name, ..BenchResults::default() };
        match Box::pin(bench.run(session, args)).await {
            Ok(environments) => {
                if !args.quick && args.part.is_none() {
                    record_time(session, "bench", &result.name, step.elapsed());
                }
                step.done("");
                let requirements = bench.requirements(args);
                let judged = requirements.iter().flat_map(|requirement| requirement.judge(&environments));
                result.thresholds = judged.collect();
                result.environments = environments;
            }
            // A run that was stopped runs no further benchmark, and that of a single one has nothing to report.
            Err(error) if session.cancel.is_cancelled() || benches.len() == 1 => return Err(error),
            Err(error) => {
                let error = format!("{error:#}");
                step.failed(&error);
                result.error = Some(error);
            }
        }
        results.benches.push(result);
        // A run of all takes long. What it measured remains if it is stopped.
        results.write(json)?;
        write(&json.with_extension("txt"), &report::text(&results))?;
    }
    Ok(results)
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// Returns the commit of the checkout at `root`, with `-dirty` if tracked files have changed. Returns `None` if `root` is no checkout
/// or Git is not installed.
async fn commit(root: &Path) -> Option<String> {
    let describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"];
    let finished = testvm::process::git(root).args(describe).finish().await.ok()?;
    finished.status.success().then(|| finished.stdout.trim().to_owned())
}

fn exit_code(is_success: bool) -> ExitCode {
    if is_success { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn directory_without_repository_has_no_commit() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(commit(directory.path()).await, None);
    }
}
