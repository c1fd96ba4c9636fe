//! Benchmarks: measured by programs of their own, told here in tables, plots and claims that hold or do not.
//!
//! Each writes `NAME.json` and, where there is something to draw, `NAME.svg` below `target/bench`.

mod batch;
mod claim;
mod clones;
mod cluster;
mod deletion;
mod growth;
mod guest;
mod in_memory;
mod loop_devices;
mod measurement;
mod plot;
mod provision;
mod table;
mod volume_stats;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::session::Session;
use claim::Claim;
use measurement::Measurements;
use plot::Plot;

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[arg(value_name = "NAME")]
    bench: Bench,
    /// A short run: fewer devices, ids, files, bytes and repetitions. What it claims is not what is claimed of a full run.
    #[arg(long)]
    quick: bool,
    /// Fail if a claim does not hold.
    #[arg(long)]
    check: bool,
    /// The kernel of vm-images/kernels/kernels.toml for what is measured in a virtual machine.
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Where to make the backing files; their file system is measured with them. The default is in cargo's target
    /// directory.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Bench {
    /// Attaching, finding, detaching and removing loop devices; allocating project ids.
    Loop,
    /// Statistics of volumes with few files and with many.
    Csi,
    /// Cloning and snapshotting images, and cloning directory trees.
    Clone,
    /// Many claims at once on a real cluster, beside external-provisioner.
    Provision,
    /// Claims that grow in use on a real cluster: when the pod sees it, and what the kubelet alone would take.
    Growth,
    /// Claims of volumes with many files deleted at once on a real cluster, while others are made; and of volumes in memory.
    Deletion,
}

/// What a benchmark found.
struct Outcome {
    name: &'static str,
    measurements: Measurements,
    claims: Vec<Claim>,
    plots: Vec<Plot>,
}

/// Runs a benchmark and tells what it found.
///
/// # Errors
/// It cannot be run to its end.
pub async fn run(session: &Session, args: &Args) -> Result<ExitCode> {
    let outcome = match args.bench {
        Bench::Loop => loop_devices::run(session, args).await?,
        Bench::Csi => volume_stats::run(session, args).await?,
        Bench::Clone => clones::run(session, args).await?,
        Bench::Provision => provision::run(session, args).await?,
        Bench::Growth => growth::run(session, args).await?,
        Bench::Deletion => deletion::run(session, args).await?,
    };
    let directory = directory(session)?;
    let json = directory.join(format!("{}.json", outcome.name));
    outcome.measurements.write(&json, outcome.name)?;
    let svg = directory.join(format!("{}.svg", outcome.name));
    plot::write(&svg, &outcome.measurements, &outcome.plots)?;

    session.progress.finish();
    println!("{}", table::measurements(&outcome.measurements));
    println!("{}", table::claims(&outcome.claims));
    println!("{}\n{}", json.display(), svg.display());
    println!("{}", table::verdict(&outcome.claims));
    let held = outcome.claims.iter().all(|claim| claim.holds == Some(true));
    Ok(if held || !args.check { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn directory(session: &Session) -> Result<PathBuf> {
    let directory = session.workspace.reports("bench");
    std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    Ok(directory)
}
