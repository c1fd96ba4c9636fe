//! Power cuts. Threads change the store while the disk's writes are logged, and the machine is killed. Then
//! another machine mounts each disk under examination, recovers the store, and compares it with the threads'
//! output.
//!
//! One disk is the one that the kill left. The others are disks that other power cuts could have left. For an
//! operation of each kind, the writes are replayed up to its middle, where each unflushed write survives or
//! is lost at random, and to just after it, where all unflushed writes are lost. The last disk loses a flush,
//! which the check must notice.

mod cuts;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testvm::images::{disk, write_log};
use testvm::progress::Step;
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::test_machine::{GuestResults, HARDENED, MACHINE, TestMachine, xfs};
use testvm::vm::{Disk, DiskMode, ExitReason};
use testvm_guest::spec::{TestBinary, TestsSpec};

use self::cuts::{Cut, cuts, replay};
use super::libtest::Run;
use super::machines::{self, Machines};
use super::seed::{self, SEED};

/// The test target of loopfs that holds both halves.
pub(super) const TEST: &str = "power_cut";

const WORK: &str = "work::until_the_power_is_cut";
const CHECK: &str = "check::nothing_is_lost_and_nothing_leaks";
/// The number of lines before the kill. The kill waits further until each operation is in the log, because
/// the threads choose operations at random.
const LINES: usize = 500;
/// The number of lines between two reads of the log.
const MORE_LINES: usize = 20;

const PROGRAM: &str = "/tests/power_cut";
const DISK_MIB: u64 = 1024;
const WORK_TIMEOUT: Duration = Duration::from_secs(240);
const CHECK_TIMEOUT: Duration = Duration::from_secs(120);

/// `seed` chooses the threads' operations and the positions of the cuts. It does not determine how the threads interleave. The write log
/// repeats a cut exactly, and is kept if a check fails.
pub(super) async fn run(session: &Session, machines: &Machines, program: &Path, seed: u64) -> Report {
    let suite = format!("kernel {}: power cut", machines.kernel.name());
    let mut report = Report::new();
    let step = session.progress.step(format!("cut the power on Linux {}", machines.kernel.release()));
    let disks = machines.logs.join("power-cut-disks");
    let started = Instant::now();
    let result = cut_and_check(machines, program, &disks, &suite, seed, &mut report, &step).await;
    if result.is_err() {
        report.record(&suite, "cut and check", started.elapsed(), &result);
    }
    if !report.succeeded() {
        step.failed(format!("{}; the disks are in {}", report.summary(), disks.display()));
        return report;
    }
    match std::fs::remove_dir_all(&disks) {
        Ok(()) => step.done(report.summary()),
        Err(error) => step.done(format!("{}; {} stays: {error}", report.summary(), disks.display())),
    }
    report
}

async fn cut_and_check(
    machines: &Machines,
    program: &Path,
    directory: &Path,
    suite: &str,
    seed: u64,
    report: &mut Report,
    step: &Step,
) -> Result<()> {
    std::fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let new = directory.join("new");
    disk::xfs(&new, DISK_MIB).await?;
    let killed = Disk { name: "work".to_owned(), image: directory.join("work"), mode: DiskMode::Logged };
    disk::copy(&new, &killed.image).await?;

    let started = Instant::now();
    work(machines, program, &killed, seed).await?;
    report.push(suite, "the machine is killed", Outcome::Passed, started.elapsed());
    let entries = write_log::read(&killed.write_log())?;
    let cuts = cuts(&entries, seed)?;
    step.note(format!("{} writes, {} cuts", entries.len(), cuts.len()));
    let mut disks = vec![Disk { mode: DiskMode::Persistent, ..killed }];
    for (index, cut) in cuts.iter().enumerate() {
        let image = directory.join(format!("cut-{index}"));
        disk::copy(&new, &image).await?;
        replay(&image, &entries, cut)?;
        // A disk that forgets a flush may be corrupt, so it is not checked.
        let mode = if cut.forgets_a_flush() { DiskMode::Scratch } else { DiskMode::Persistent };
        disks.push(Disk { name: format!("cut-{index}"), image, mode });
    }
    let binaries = disks.iter().map(|disk| binary(&disk.name, CHECK, CHECK_TIMEOUT)).collect();
    let heard = machine(machines, program, "power-cut-check", disks, binaries).run(step).await?;
    evaluate(report, suite, &heard, &cuts, machines, (seed, entries.len()));
    Ok(())
}

async fn work(machines: &Machines, program: &Path, disk: &Disk, seed: u64) -> Result<()> {
    let mut binary = binary("work", WORK, WORK_TIMEOUT);
    binary.args.push("--nocapture".to_owned());
    binary.env.extend(seed::variables(seed));
    let vm = machine(machines, program, "power-cut-work", vec![disk.clone()], vec![binary]).boot().await?;
    let mut missing = format!("fewer than {LINES} lines were said");
    for lines in (LINES..).step_by(MORE_LINES) {
        let said = vm.wait_said("work", lines, WORK_TIMEOUT).await;
        said.with_context(|| format!("not all is done that is to be cut: {missing}"))?;
        match write_log::read(&disk.write_log()).and_then(|entries| cuts(&entries, seed)) {
            Ok(_) => break,
            Err(error) => missing = format!("{error:#}"),
        }
    }
    vm.power_cut().await
}

/// Returns a machine with its logs in the directory of its name. All disks are copies of one image.
fn machine<'a>(
    machines: &'a Machines,
    program: &Path,
    name: &str,
    disks: Vec<Disk>,
    binaries: Vec<TestBinary>,
) -> TestMachine<'a> {
    let options = format!("prjquota,nouuid,{HARDENED}");
    let mounts = disks.iter().map(|disk| xfs(&disk.name, &mount_point(&disk.name), &options)).collect();
    let tests = TestsSpec { mounts, binaries, ..TestsSpec::default() };
    let files = vec![machines::program(PROGRAM, program.to_owned())];
    TestMachine { logs: machines.logs.join(name), ..machines.machine(name, files, disks, tests) }
}

/// Returns one test of the program, with the name of its disk.
fn binary(disk: &str, test: &str, timeout: Duration) -> TestBinary {
    TestBinary {
        name: disk.to_owned(),
        path: PROGRAM.to_owned(),
        args: vec!["--exact".to_owned(), test.to_owned()],
        env: BTreeMap::from([("LOOPFS_TEST_XFS".to_owned(), mount_point(disk))]),
        timeout,
        ..TestBinary::default()
    }
}

fn mount_point(disk: &str) -> String {
    format!("/mnt/{disk}")
}

fn evaluate(
    report: &mut Report,
    suite: &str,
    heard: &GuestResults,
    cuts: &[Cut],
    machines: &Machines,
    (seed, writes): (u64, usize),
) {
    let GuestResults { results, ending, .. } = heard;
    let logs = machines.logs.join("power-cut-check");
    let mut unexplained = matches!(ending, ExitReason::Crashed(_)) || results.len() != cuts.len() + 1;
    let disks = std::iter::once(("work".to_owned(), None))
        .chain(cuts.iter().enumerate().map(|(index, cut)| (format!("cut-{index}"), Some(cut))));
    for (disk, cut) in disks {
        let name = cut.map_or("what the kill left", |cut| cut.name.as_str());
        let Some(result) = results.get(&disk) else {
            report.push(suite, name, Outcome::NotRun, None);
            continue;
        };
        let output = std::fs::read_to_string(logs.join(format!("{disk}.log"))).unwrap_or_default();
        let failure = failure(&output, heard.ended_well(&disk).0);
        let outcome = match (cut, failure) {
            (Some(cut), Some(why)) if cut.forgets_a_flush() && why.contains("is lost") => Outcome::Passed,
            (Some(cut), other) if cut.forgets_a_flush() => {
                Outcome::Failed(format!("{}: a volume was lost, and the check said {other:?}", cut.mark))
            }
            (_, None) => Outcome::Passed,
            (cut, Some(why)) => {
                let place = cut.map(|cut| format!(" before write {} of {writes}, at {}", cut.at, cut.mark));
                Outcome::Failed(format!(
                    "cut{} ({SEED}={seed}, disk {disk}):\n{why}",
                    place.unwrap_or_default()
                ))
            }
        };
        unexplained &= matches!(outcome, Outcome::Passed);
        report.push(suite, name, outcome, result.time);
    }
    // The check of the disk that forgets a flush fails, so the guest always reports a failure.
    if unexplained || matches!(ending, ExitReason::Faulty(_)) {
        let why = ending.failure().unwrap_or("no test failed");
        let why = format!("{} of {} disks were checked: {why}", results.len(), cuts.len() + 1);
        report.push(suite, MACHINE, Outcome::Failed(why), None);
    }
}

/// Returns the reason why the one test that ran did not pass, or `None` if it passed.
fn failure(output: &str, ended_well: Result<(), String>) -> Option<String> {
    let mut one = Report::new();
    Run::parse(output).report(&mut one, "", ended_well, &[]);
    if one.succeeded() {
        return None;
    }
    let failures = one.cases.into_iter().filter_map(|case| match case.outcome {
        Outcome::Failed(why) => Some(why),
        _ => None,
    });
    Some(failures.collect::<Vec<_>>().join("\n"))
}
