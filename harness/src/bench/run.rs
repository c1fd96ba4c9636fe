//! Runs the benchmarks of a command line, writes the report, and compares it with an earlier one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use testvm::session::Session;

use super::cluster::SharedCluster;
use super::comparison::Comparison;
use super::outcome::{Args, Bench, Outcome, directory};
use super::plot::Plot;
use super::results::Results;
use super::threshold::Threshold;
use super::{
    burst, catalogue, clones, deletion, footprint, growth, io, loop_devices, node, provision, report, rpc,
    scale, source, table, volume_stats,
};
use crate::listing::record_time;

/// The results of a run, and what they do not have.
struct Measured {
    results: Results,
    thresholds: Vec<Threshold>,
    /// The plots of each benchmark, by its name.
    plots: BTreeMap<String, &'static [Plot]>,
    /// The tables of all benchmarks.
    tables: String,
}

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
        print!("{}", comparison.table());
        return Ok(exit_code(!comparison.has_worse()));
    }

    // Two runs would disturb each other, and write the same files.
    let _lock = session.exclusive("bench").await?;
    let measured = Box::pin(measure(session, args)).await?;
    let comparison = old.map(|old| Comparison::of(&old, &measured.results, args.factor));
    let plots_of = |bench: &str| measured.plots.get(bench).copied().unwrap_or_default();
    let page = report::page(&measured.results, plots_of, comparison.as_ref())?;
    let html = directory(session)?.join("report.html");
    std::fs::write(&html, page).with_context(|| format!("write {}", html.display()))?;

    session.progress.finish();
    print!("{}", measured.tables);
    for failure in &measured.results.failures {
        println!("the benchmark {} did not complete: {}", failure.bench, failure.error);
    }
    if let Some(comparison) = &comparison {
        println!("{}", comparison.table());
    }
    println!("{}\n{}", json(session)?.display(), html.display());
    println!("{}", table::verdict(&measured.thresholds));
    let all_met = measured.thresholds.iter().all(|threshold| threshold.is_met == Some(true));
    let is_worse = comparison.is_some_and(|comparison| comparison.has_worse());
    let is_complete = measured.results.failures.is_empty();
    Ok(exit_code(is_complete && !is_worse && (all_met || !args.check)))
}

/// Runs the benchmarks, and writes the results after each one.
async fn measure(session: &Session, args: &Args) -> Result<Measured> {
    let benches = args.benches();
    let json = json(session)?;
    let mut measured = Measured {
        results: Results::new(source::of(session.workspace.root()).await, args.quick),
        thresholds: Vec::new(),
        plots: BTreeMap::new(),
        tables: String::new(),
    };
    let mut shared = shared_cluster(session, &benches).await;
    for (number, bench) in benches.iter().enumerate() {
        let name = bench.name();
        let step = session.progress.step(format!("benchmark {name}, {} of {}", number + 1, benches.len()));
        let outcome = run_one(session, args, *bench, &mut shared).await;
        match outcome {
            Ok(outcome) => {
                if !args.quick && args.part.is_none() {
                    record_time(session, "bench", &name, step.elapsed());
                }
                step.done("");
                measured.add(&name, outcome);
            }
            // A run that was stopped runs no further benchmark, and that of a single one has nothing to report.
            Err(error) if session.cancel.is_cancelled() || benches.len() == 1 => return Err(error),
            Err(error) => {
                step.failed(format!("{error:#}"));
                measured.results.add_failure(&name, &error);
            }
        }
        // A run of all takes long. What it measured remains if it is stopped.
        measured.results.write(&json)?;
    }
    if let Err(error) = Box::pin(shared.stop()).await {
        measured.results.add_failure("cluster", &error.context("stop the shared cluster"));
    }
    Ok(measured)
}

impl Measured {
    fn add(&mut self, bench: &str, outcome: Outcome) {
        self.results.add(bench, &outcome);
        self.tables += &table::measurements(&outcome.measurements);
        self.tables += &format!("\n{}\n", table::thresholds(&outcome.thresholds));
        self.plots.insert(bench.to_owned(), outcome.plots);
        self.thresholds.extend(outcome.thresholds);
    }
}

async fn run_one(
    session: &Session,
    args: &Args,
    bench: Bench,
    shared: &mut SharedCluster,
) -> Result<Outcome> {
    match bench {
        Bench::Loop => loop_devices::run(session, args).await,
        Bench::Csi => volume_stats::run(session, args).await,
        Bench::Clone => clones::run(session, args).await,
        Bench::Rpc => rpc::run(session, args).await,
        Bench::Io => io::run(session, args).await,
        Bench::Scale => scale::run(session, args).await,
        Bench::Burst => burst::run(session, args).await,
        Bench::Footprint => footprint::run(session, args, shared).await,
        Bench::Provision => provision::run(session, args, shared).await,
        Bench::Growth => growth::run(session, args, shared).await,
        Bench::Deletion => deletion::run(session, args, shared).await,
        Bench::Node => node::run(session, args).await,
    }
}

/// Returns the cluster of a run: one for all benchmarks, with the tools of each, if there are several.
async fn shared_cluster(session: &Session, benches: &[Bench]) -> SharedCluster {
    if benches.len() == 1 {
        return SharedCluster::of_one();
    }
    let tools = session.until_cancelled(provision::peer::tools(session)).await.unwrap_or_else(|error| {
        // The benchmark that needs them reports the error.
        session.progress.line(format!("the shared cluster lacks tools: {error:#}"));
        Vec::new()
    });
    SharedCluster::with_tools(tools)
}

/// Reads and combines files of results. Returns `None` if there are none.
fn read(paths: &[PathBuf]) -> Result<Option<Results>> {
    let read = paths.iter().map(|path| Results::read(path));
    Ok(Results::pooled(read.collect::<Result<_>>()?))
}

fn json(session: &Session) -> Result<PathBuf> {
    Ok(directory(session)?.join("report.json"))
}

fn exit_code(is_success: bool) -> ExitCode {
    if is_success { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
