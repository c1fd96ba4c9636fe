//! The command line, and the exit code of each command.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};
use testvm::report::{Report, ReportFiles, Timed};
use testvm::session::Session;
use testvm::vm::report_repeated_boots;
use tokio::signal::unix::{SignalKind, signal};

use crate::{bench, e2e, fetch, lanes, listing, project, up};

/// Runs loopfs in its real environment: real kernels in QEMU, a real kubelet, a real control plane.
///
/// Only the installation of a few distribution packages needs root. If one is missing, the message has the
/// command that installs it. Everything built or downloaded is cached in the user's cache directory, so only
/// the first run is slow.
#[derive(Debug, Parser)]
#[command(name = "cargo harness", bin_name = "cargo harness", after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  cargo harness list                  lanes, stories and benchmarks: what each needs, and how long it last took here
  cargo harness test --lane unit      format, lints and unit tests, no root and no virtual machine
  cargo harness test --lane kernel --only quota
                                      the tests with this text in their names, as root on real kernels
  cargo harness e2e                   claims on a real Kubernetes node: mounted, read-only, block, resized
  cargo harness e2e --all             the same, and all other stories that need no programs of other projects
  cargo harness e2e --keep            claims on a node as above, and leaves the cluster up to look around in
  cargo harness bench --quick         short runs of all benchmarks, and one report in target/bench/report.txt
  cargo harness fetch --update        the newest kernels and packages of Debian; other commands stay with what was fetched
  cargo harness up                    a cluster to play with; `cargo harness down` removes it
  cargo harness image                 the driver's image for amd64 and arm64, as an archive for a registry
  cargo harness deb                   Debian packages, for nodes that run the driver as services of systemd";

#[derive(Debug, Subcommand)]
enum Command {
    /// List the test lanes with their parts, the stories of the end-to-end tests and the benchmarks: what each needs, and how
    /// long it last took here.
    List,
    /// Run the test lanes that CI runs, or those that --lane selects.
    Test(lanes::TestArgs),
    /// Run the end-to-end stories on a cluster of the harness, or on any cluster with --kubeconfig.
    E2e(e2e::CommandArgs),
    /// Run a benchmark or all, compare the results with the thresholds, and optionally with an earlier run.
    Bench(bench::Args),
    /// Fill the cache with what the lanes of CI need, and print its versions; --update moves to the newest packages.
    Fetch(fetch::FetchArgs),
    /// Start a cluster with the driver installed, and leave it running.
    Up(up::UpArgs),
    /// Stop the cluster that `up` or `e2e --keep` left running.
    Down,
    /// Write the driver's image for each platform, as an archive for a registry.
    Image(release::ImageArgs),
    /// Write a Debian package of the driver for each platform.
    Deb(release::DebArgs),
    /// Write the files of a release: the image, the packages, the manifests, checksums and notes.
    Release(release::ReleaseArgs),
}

/// The time for an orderly end after Ctrl-C.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Parses the command line and runs it. Errors are printed once, with their causes.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: starting the async runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(async {
        let session = project::session()?;
        unwind_on_signal(&session, Box::pin(run(&session, cli.command))).await
    });
    // A blocking thread that still waits must not delay the exit of a finished run.
    runtime.shutdown_timeout(Duration::from_secs(5));
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(session: &Session, command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List => {
            let lanes = "lanes (cargo harness test --lane LANE), and the parts of a lane (--only PART):";
            let stories = "stories (cargo harness e2e STORY..., or --all):";
            println!("{}", listing::section(session, lanes, lanes::lines()));
            println!("{}", listing::section(session, stories, e2e::lines()));
            print!("{}", bench::list(session));
            Ok(ExitCode::SUCCESS)
        }
        Command::Test(mut args) => {
            let _lock = session.exclusive("test").await?;
            args.resolve_failed(&session.workspace.reports("test").join("report.json"))?;
            // `report_files` removes the report that --failed reads.
            args.check()?;
            let files = report_files(session, "test")?;
            conclude(session, &files, lanes::run(session, &args).await?)
        }
        Command::E2e(args) => {
            let args = args.into_args();
            args.check()?;
            let _lock = args.lock(session).await?;
            let files = report_files(session, "e2e")?;
            conclude(session, &files, e2e::run(session, &args).await?)
        }
        Command::Bench(args) => bench::run(session, &args).await,
        Command::Fetch(args) => {
            session.until_cancelled(fetch::fetch(session, &args)).await.map(|()| ExitCode::SUCCESS)
        }
        Command::Up(args) => up::up(session, args).await.map(|()| ExitCode::SUCCESS),
        Command::Down => up::down(session).await.map(|()| ExitCode::SUCCESS),
        Command::Image(args) => exclusively(session, release::image(session, args)).await,
        Command::Deb(args) => exclusively(session, release::deb(session, args)).await,
        Command::Release(args) => exclusively(session, release::release(session, args)).await,
    }
}

/// Runs a command whose builds share a directory.
async fn exclusively(
    session: &Session,
    work: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<ExitCode> {
    let _lock = session.exclusive("image").await?;
    session.until_cancelled(work).await.map(|()| ExitCode::SUCCESS)
}

fn report_files(session: &Session, run: &str) -> anyhow::Result<ReportFiles> {
    ReportFiles::begin(session.workspace.reports(run), session.project.name)
}

/// Prints the report, writes its files, and returns the exit code.
fn conclude(session: &Session, files: &ReportFiles, mut report: Report) -> anyhow::Result<ExitCode> {
    report_repeated_boots("virtual machines", &mut report);
    report.versions = session.versions.all();
    let ended = session.progress.ended().into_iter();
    report.steps = ended.map(|(name, time)| Timed { name, time }).collect();
    files.write(&report)?;
    session.progress.finish();
    println!("{}{}", report.table(), report.times());
    println!("reports and logs: {}", files.directory().display());
    if report.not_run() > 0 {
        println!("{} not run", report.not_run());
    }
    println!("{}", report.summary());
    Ok(if report.succeeded() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs `work` to its end. The first signal cancels the session, and `work` has [`STOP_TIMEOUT`] to end. A
/// second signal, or the end of that time, drops `work`. Every process that it owns is then killed by its
/// owner.
async fn unwind_on_signal<F>(session: &Session, work: F) -> anyhow::Result<ExitCode>
where
    F: Future<Output = anyhow::Result<ExitCode>>,
{
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut work = std::pin::pin!(work);
    tokio::select! {
        result = &mut work => return result,
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    session.progress.line("stopping: cleaning up (press again to stop immediately)");
    session.cancel.cancel();
    tokio::select! {
        result = &mut work => {
            result.context("stopped by a signal")?;
            anyhow::bail!("stopped by a signal")
        }
        _ = interrupt.recv() => anyhow::bail!("stopped immediately by a second signal"),
        _ = terminate.recv() => anyhow::bail!("stopped immediately by a second signal"),
        () = tokio::time::sleep(STOP_TIMEOUT) => {
            anyhow::bail!("stopped by a signal; the clean-up did not end within {STOP_TIMEOUT:?} and was cut short")
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Cli;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
