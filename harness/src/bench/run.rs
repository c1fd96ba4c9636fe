//! Runs one benchmark: its command line, tables, files and exit code.

use std::process::ExitCode;

use anyhow::Result;
use testvm::session::Session;

use super::outcome::{Args, Bench, directory};
use super::{clones, deletion, growth, loop_devices, node, plot, provision, table, volume_stats};

/// Runs a benchmark, prints its tables and writes its files.
///
/// # Errors
/// The benchmark does not complete, or it has no such option.
pub async fn run(session: &Session, args: &Args) -> Result<ExitCode> {
    args.check()?;
    let outcome = match args.bench {
        Bench::Loop => loop_devices::run(session, args).await?,
        Bench::Csi => volume_stats::run(session, args).await?,
        Bench::Clone => clones::run(session, args).await?,
        Bench::Provision => provision::run(session, args).await?,
        Bench::Growth => growth::run(session, args).await?,
        Bench::Deletion => deletion::run(session, args).await?,
        Bench::Node => node::run(session, args).await?,
    };
    let directory = directory(session)?;
    let name = args.bench.name();
    let json = directory.join(format!("{name}.json"));
    outcome.measurements.write(&json, &name)?;
    let svg = directory.join(format!("{name}.svg"));
    plot::write(&svg, &outcome.measurements, outcome.plots)?;

    session.progress.finish();
    println!("{}", table::measurements(&outcome.measurements));
    println!("{}", table::thresholds(&outcome.thresholds));
    println!("{}\n{}", json.display(), svg.display());
    println!("{}", table::verdict(&outcome.thresholds));
    let all_met = outcome.thresholds.iter().all(|threshold| threshold.is_met == Some(true));
    Ok(if all_met || !args.check { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
