//! Runs the benchmarks of a command line, writes the report, and compares it with an earlier one.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use testvm::session::Session;

use super::args::{Args, Bench};
use super::cluster::SharedCluster;
use super::comparison::Comparison;
use super::measurement::Measurements;
use super::results::{Results, Source, directory};
use super::{catalogue, peer, report};
use crate::listing::record_time;

/// Runs one benchmark or all, prints their tables and writes the report. With the options for it, it only lists the benchmarks,
/// or only compares earlier runs.
///
/// # Errors
/// The only benchmark does not complete, it has no such option, or a file cannot be read or written.
pub async fn run(session: &Session, args: &Args) -> Result<ExitCode> {
    args.check()?;
    if args.list {
        print!("{}", catalogue::list(session));
        return Ok(ExitCode::SUCCESS);
    }
    // Before anything is measured: a wrong path should not cost a run, and the run may overwrite the file.
    let old = read(&args.compare)?;
    let recorded = read(&args.results)?;
    if let (Some(old), Some(new)) = (&old, &recorded) {
        let comparison = Comparison::of(old, new, args.factor);
        print!("{}", report::changes(&comparison));
        return Ok(exit_code(!comparison.has_worse()));
    }

    // Two runs would disturb each other, and write the same files.
    let _lock = session.exclusive("bench").await?;
    let json = directory(session)?.join("report.json");
    let results = Box::pin(measure(session, args, &json)).await?;
    let comparison = old.map(|old| Comparison::of(&old, &results, args.factor));
    let html = json.with_extension("html");
    std::fs::write(&html, report::page(&results, comparison.as_ref())?)
        .with_context(|| format!("write {}", html.display()))?;

    session.progress.finish();
    print!("{}", report::text(&results));
    if let Some(comparison) = &comparison {
        println!("{}", report::changes(comparison));
    }
    println!("{}\n{}", json.display(), html.display());
    println!("{}", report::verdict(&results.thresholds));
    let all_met = results.thresholds.iter().all(|threshold| threshold.is_met == Some(true));
    let is_worse = comparison.is_some_and(|comparison| comparison.has_worse());
    Ok(exit_code(results.failures.is_empty() && !is_worse && (all_met || !args.check)))
}

/// Runs the benchmarks, and writes the results after each one.
async fn measure(session: &Session, args: &Args, json: &Path) -> Result<Results> {
    let benches = args.benches();
    let mut results = Results::new(source(session.workspace.root()).await, args.quick);
    let mut shared = shared_cluster(session, &benches).await;
    for (number, bench) in benches.iter().enumerate() {
        let name = bench.name();
        let step = session.progress.step(format!("benchmark {name}, {} of {}", number + 1, benches.len()));
        match bench.run(session, args, &mut shared).await {
            Ok(parts) => {
                if !args.quick && args.part.is_none() {
                    record_time(session, "bench", &name, step.elapsed());
                }
                step.done("");
                let all = Measurements { parts };
                let requirements = (bench.entry().requirements)(args);
                let judged = requirements.iter().flat_map(|requirement| requirement.judge(&name, &all));
                results.add(&name, &all, judged.collect());
            }
            // A run that was stopped runs no further benchmark, and that of a single one has nothing to report.
            Err(error) if session.cancel.is_cancelled() || benches.len() == 1 => return Err(error),
            Err(error) => {
                step.failed(format!("{error:#}"));
                results.add_failure(&name, &error);
            }
        }
        // A run of all takes long. What it measured remains if it is stopped.
        results.write(json)?;
    }
    if let Err(error) = Box::pin(shared.stop()).await {
        results.add_failure("cluster", &error.context("stop the shared cluster"));
    }
    Ok(results)
}

/// Returns the cluster of a run: one for all benchmarks, with the tools of each, if there are several.
async fn shared_cluster(session: &Session, benches: &[Bench]) -> SharedCluster {
    if benches.len() == 1 {
        return SharedCluster::default();
    }
    let tools = session.until_cancelled(peer::tools(session)).await.unwrap_or_else(|error| {
        // The benchmark that needs them reports the error.
        session.progress.line(format!("the shared cluster lacks tools: {error:#}"));
        Vec::new()
    });
    SharedCluster::with_tools(tools)
}

/// Returns the commit of the checkout at `root`. The commit is `None` if `root` is no checkout or Git is not installed.
async fn source(root: &Path) -> Source {
    let output = async |args: &[&str]| {
        let finished = testvm::process::git(root).args(args.iter().copied()).finish().await.ok()?;
        finished.status.success().then_some(finished.stdout)
    };
    let commit = output(&["rev-parse", "HEAD"]).await.map(|commit| commit.trim().to_owned());
    let changes = output(&["status", "--porcelain", "--untracked-files=no"]).await;
    Source { commit, has_changes: changes.is_some_and(|changes| !changes.is_empty()) }
}

/// Reads and combines files of results. Returns `None` if there are none.
fn read(paths: &[PathBuf]) -> Result<Option<Results>> {
    let read = paths.iter().map(|path| Results::read(path));
    Ok(Results::pooled(read.collect::<Result<_>>()?))
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
        assert_eq!(source(directory.path()).await, Source::default());
    }
}
