//! The kernel lane: `tests/kernel` of each crate that has them, as root on real kernels in QEMU, as many
//! concurrently as this machine has processors. It also simulates power cuts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::StreamExt;
use testvm::images::debian_program::{DebianProgram, LOSETUP, MKFS_EXT4, MKFS_XFS};
use testvm::images::disk;
use testvm::images::kernel::Kernel;
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::test_machine::{GuestResults, HARDENED, MEMORY_MIB, TestMachine, data_disk, xfs};
use testvm::vm::{self, GuestFile, Hypervisor};
use testvm::{cache, packages, process};
use testvm_guest::spec::{TestBinary, TestsSpec};

use super::libtest::Run;
use super::{go_tests, machine_faults, power_cut};
use crate::builds;

/// The test target, the same in every crate that has kernel tests.
pub(super) const TEST: &str = "kernel";
/// The crates with kernel tests.
const PACKAGES: [&str; 3] = ["loopfs", "loopfs-tool", "csi"];
/// The tool of loopfs, which tests run, and its path in the guest.
const TOOL: &str = "loopfs";
const TOOL_PATH: &str = "/tests/programs/loopfs";
/// The directory in the guest of the example programs of loopfs, which its tests run.
const EXAMPLES: &str = "/tests/examples";

/// The programs that the tests run.
pub(super) const DEBIAN_PROGRAMS: [DebianProgram; 3] = [LOSETUP, MKFS_XFS, MKFS_EXT4];

/// The tests of the Go code that becomes part of the kubelet.
const GO_TESTS: &str = "/tests/kubelet-quota";

/// The variables with the seed that repeats the random choices of a test, and with the number of its random operations.
const SEED: &str = "LOOPFS_TEST_SEED";
const STEPS: &str = "LOOPFS_TEST_STEPS";

/// Tests that take long and whose results depend on the number of volumes, files, calls or devices rather than on
/// the kernel. If several kernels are booted, they run on the default kernel only.
const ON_ONE_KERNEL: [&str; 5] =
    ["inode_space::", "many_devices::", "restart_storm::", "rpc_table::", "store_model::"];

/// Tests of calls whose results depend on the kernel. They run on each kernel.
const KERNELS_DIFFER: [&str; 8] = [
    "clones::",
    "detach::",
    "loop_devices::",
    "losetup::",
    "other_programs::",
    "refusals::",
    "settings::",
    "special_files::",
];

const BINARY_TIMEOUT: Duration = Duration::from_secs(1200);
/// The timeout if the number of random operations is given, which may be any.
const LONG_TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// The kernels that a run boots.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernels<'a> {
    One(&'a str),
    /// All tests on the default kernel and on one of the others, which the commit chooses, and [`KERNELS_DIFFER`] on the rest.
    OfTheCommit,
    All,
}

/// What one kernel runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Share {
    All,
    /// All but [`ON_ONE_KERNEL`].
    Most,
    /// [`KERNELS_DIFFER`].
    Differing,
}

pub(super) async fn run(session: &Session, kernels: Kernels<'_>, only: &[String]) -> Result<Report> {
    session.until_cancelled(prepare_and_run(session, kernels, only)).await
}

async fn prepare_and_run(session: &Session, kernels: Kernels<'_>, only: &[String]) -> Result<Report> {
    let names = Kernel::names(&session.workspace)?;
    let default = Kernel::default_name(session)?;
    let shares = match kernels {
        Kernels::One(name) => vec![(name.to_owned(), Share::All)],
        Kernels::All => shares(&names, &default, None),
        // A test that is named runs everywhere.
        Kernels::OfTheCommit if !only.is_empty() => shares(&names, &default, None),
        Kernels::OfTheCommit => shares(&names, &default, Some(commit(session).await)),
    };
    let directory = tempfile::tempdir().context("make a directory")?;
    let programs = Programs::build(session, directory.path());
    let (programs, ()) = tokio::try_join!(programs, packages::ensure(session, packages::VIRTUAL_MACHINE))?;
    let tested = futures::stream::iter(&shares).map(async |(name, share)| {
        let _processor = session.processor().await;
        let started = Instant::now();
        let result = test(session, name, &programs, *share, only).await;
        with_failure(result, name, started)
    });
    let reports: Vec<Report> = tested.buffered(shares.len()).collect().await;
    let mut report = Report::new();
    reports.into_iter().for_each(|of_kernel| report.append(of_kernel));
    if only.is_empty() {
        require_tests(&ON_ONE_KERNEL, &mut report);
        require_tests(&KERNELS_DIFFER, &mut report);
    }
    Ok(report)
}

/// Returns the kernels with their shares, the default kernel first: its share takes longest. Without a number, all others run most tests.
fn shares(names: &[String], default: &str, commit: Option<u64>) -> Vec<(String, Share)> {
    let others: Vec<&String> = names.iter().filter(|name| *name != default).collect();
    let chosen = commit.map(|commit| commit % others.len().max(1) as u64);
    let share =
        |index| if chosen.is_none_or(|chosen| chosen == index) { Share::Most } else { Share::Differing };
    let of_others = (0..).zip(others).map(|(index, name)| (name.clone(), share(index)));
    let mut shares: Vec<_> = std::iter::once((default.to_owned(), Share::All)).chain(of_others).collect();
    shares.sort_by_key(|(_, share)| *share as u8);
    shares
}

/// Returns a number that depends on the commit of the checkout, or 0 outside a Git repository.
async fn commit(session: &Session) -> u64 {
    let git = process::git(session.workspace.root()).args(["rev-parse", "--short=12", "HEAD"]);
    let printed = git.run().await.map(|finished| finished.stdout).unwrap_or_default();
    u64::from_str_radix(printed.trim(), 16).unwrap_or_default()
}

/// Adds a failure for each of these names that is in the name of no test that ran. Kernels skip such tests, because another runs them.
fn require_tests(names: &[&str], report: &mut Report) {
    for name in names {
        if !report.cases.iter().any(|case| case.has_run() && case.name.contains(name)) {
            let why = "no kernel ran a test with this text in its name".to_owned();
            report.push("kernel", name, Outcome::Failed(why), None);
        }
    }
}

/// Returns the report of one kernel. A kernel that cannot be tested is a failed case, because the results of the others count.
fn with_failure(result: Result<Report>, kernel: &str, started: Instant) -> Report {
    result.unwrap_or_else(|error| {
        let mut report = Report::new();
        report.record::<()>(&suite(kernel), "run the tests", started.elapsed(), &Err(error));
        report
    })
}

/// Returns the name of the machine that runs the tests on a kernel.
fn machine_name(kernel: &str) -> String {
    format!("kernel-{kernel}")
}

fn suite(kernel: &str) -> String {
    format!("kernel {kernel}")
}

/// The programs that all kernels run.
struct Programs {
    init: PathBuf,
    /// The files of the tests.
    files: Vec<GuestFile>,
    power_cut: PathBuf,
}

impl Programs {
    /// Builds them. `directory` is for those that are not in the cache.
    async fn build(session: &Session, directory: &Path) -> Result<Programs> {
        let file = |path: String, host: PathBuf| GuestFile { path, mode: 0o755, host };
        let tests = builds::guest_tests(session).await?;
        let mut files = Vec::new();
        for package in PACKAGES {
            files.push(file(format!("/tests/{package}"), tests.test(package, TEST)?));
        }
        if go_tests::is_installed() {
            files.push(file(GO_TESTS.to_owned(), go_tests::kernel_tests(session, directory).await?));
        }
        let power_cut = tests.test("loopfs", power_cut::TEST)?;
        files.push(file(TOOL_PATH.to_owned(), tests.program(TOOL)?));
        for name in builds::examples(session)? {
            files.push(file(format!("{EXAMPLES}/{name}"), tests.program(&name)?));
        }
        // Each program brings the C library of the same suite.
        let mut debian = BTreeMap::new();
        for program in DEBIAN_PROGRAMS {
            debian.extend(program.files(session).await?);
        }
        files.extend(debian.into_iter().map(|(path, host)| file(path, host)));
        Ok(Programs { init: builds::guest_programs(session).await?.init, files, power_cut })
    }
}

/// Runs all tests on one kernel.
async fn test(
    session: &Session,
    kernel: &str,
    programs: &Programs,
    share: Share,
    only: &[String],
) -> Result<Report> {
    let Programs { init, files, power_cut } = programs;
    let kernel = Kernel::prepare(session, Some(kernel)).await?;
    let hypervisor = vm::choose(session, &kernel, init).await?;
    let logs = session.workspace.reports("test").join(machine_name(kernel.name()));
    // The logs of an earlier run must not be read as those of this run.
    cache::remove_dir(&logs)?;
    let (kernel, hypervisor, logs) = (&kernel, &hypervisor, logs.as_path());
    let left_out: &[&str] = if share == Share::Most { &ON_ONE_KERNEL } else { &[] };
    let differing = KERNELS_DIFFER.map(str::to_owned);
    let selected = if share == Share::Differing { &differing } else { only };
    let guest = Guest { kernel, hypervisor, init, files, logs, left_out };
    let mut report = run_on(session, guest, selected).await?;
    if share == Share::Differing {
        let why = "another commit runs them on this kernel; --lane extended --only kernels runs all on each";
        report.push(&suite(kernel.name()), "all other tests", Outcome::Skipped(why.to_owned()), None);
        return Ok(report);
    }
    if share == Share::All && machine_faults::is_selected(only) {
        let machine = machine_faults::Machine { kernel, hypervisor, init, logs };
        report.append(machine_faults::run(session, &machine).await);
    }
    if only.is_empty() {
        let machine = power_cut::Machine { kernel, hypervisor, init, program: power_cut, logs };
        report.append(power_cut::run(session, &machine).await);
    }
    Ok(report)
}

/// The environment of the tests on one kernel.
#[derive(Clone, Copy)]
struct Guest<'a> {
    kernel: &'a Kernel,
    hypervisor: &'a Hypervisor,
    init: &'a Path,
    files: &'a [GuestFile],
    logs: &'a Path,
    /// Tests that are skipped on this kernel and run on another one.
    left_out: &'a [&'static str],
}

async fn run_on(session: &Session, guest: Guest<'_>, only: &[String]) -> Result<Report> {
    let Guest { kernel, hypervisor, init, files, logs, left_out } = guest;
    let directory = tempfile::tempdir().context("make a directory")?;
    let data = directory.path().join("data.xfs");
    disk::xfs(&data, 1024).await?;
    let plain = directory.path().join("plain.xfs");
    disk::xfs(&plain, 512).await?;
    let machine = TestMachine {
        name: machine_name(kernel.name()),
        kernel,
        hypervisor,
        init,
        files: files.to_vec(),
        memory_mib: MEMORY_MIB,
        disks: vec![data_disk("data", &data), data_disk("plain", &plain)],
        tests: tests(files, only, left_out),
        logs: logs.to_owned(),
    };
    let step = session.progress.step(format!(
        "run the tests on Linux {} ({})",
        kernel.release(),
        hypervisor.accelerator
    ));
    let heard = machine.run(&step).await?;
    let report = evaluate(guest, only, &heard);
    match report.failed() {
        // Whether a test that this kernel is too old for runs on another one is known at the end.
        0 => step.done(report.summary()),
        _ => step.failed(report.summary()),
    }
    Ok(report)
}

/// Returns the specification of the tests. The crates define the names in it.
fn tests(files: &[GuestFile], only: &[String], left_out: &[&str]) -> TestsSpec {
    // Loop devices and quotas belong to the kernel, which all tests share.
    let mut args = vec!["--test-threads=1".to_owned()];
    args.extend_from_slice(only);
    args.extend(left_out.iter().flat_map(|name| ["--skip", name]).map(str::to_owned));
    let env = [
        ("LOOPFS_TEST_XFS", "/mnt/xfs"),
        ("LOOPFS_TEST_XFS_NOQUOTA", "/mnt/xfs-noquota"),
        ("LOOPFS_TEST_SCRATCH", "/tmp"),
        ("LOOPFS_TEST_TOOL", TOOL_PATH),
        ("LOOPFS_TEST_EXAMPLES", EXAMPLES),
        ("LOOPFS_TEST_LOSETUP", LOSETUP.path()),
        ("LOOPFS_TEST_MKFS_XFS", MKFS_XFS.path()),
        ("LOOPFS_TEST_MKFS_EXT4", MKFS_EXT4.path()),
    ];
    TestsSpec {
        mounts: vec![
            xfs("data", "/mnt/xfs", &format!("prjquota,{HARDENED}")),
            xfs("plain", "/mnt/xfs-noquota", HARDENED),
        ],
        env: env
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into_iter()
            .chain(
                [SEED, STEPS]
                    .into_iter()
                    .filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?))),
            )
            .collect::<BTreeMap<_, _>>(),
        binaries: test_binaries(files)
            .map(|file| TestBinary {
                name: binary_name(file).to_owned(),
                path: file.path.clone(),
                args: if file.path == GO_TESTS { go_tests::arguments(only) } else { args.clone() },
                timeout: if std::env::var_os(STEPS).is_some() { LONG_TIMEOUT } else { BINARY_TIMEOUT },
                ..TestBinary::default()
            })
            .collect(),
        ..TestsSpec::default()
    }
}

fn test_binaries(files: &[GuestFile]) -> impl Iterator<Item = &GuestFile> {
    files.iter().filter(|file| {
        file.path == GO_TESTS || PACKAGES.iter().any(|package| file.path == format!("/tests/{package}"))
    })
}

fn binary_name(file: &GuestFile) -> &str {
    file.path.rsplit('/').next().unwrap_or(&file.path)
}

fn evaluate(guest: Guest<'_>, only: &[String], heard: &GuestResults) -> Report {
    let Guest { kernel, files, logs, .. } = guest;
    let mut report = Report::new();
    for file in test_binaries(files) {
        let name = binary_name(file);
        let suite = format!("kernel {}: {name}", kernel.name());
        let output = std::fs::read_to_string(logs.join(format!("{name}.log"))).unwrap_or_default();
        let ended_well = heard.ended_well(name).0;
        if file.path == GO_TESTS {
            go_tests::report(&mut report, &suite, &output, ended_well, only.is_empty());
            continue;
        }
        let run = Run::parse_timed(&output, heard.line_times(name));
        run.report_selected(&mut report, &suite, ended_well, only);
    }
    let suite = suite(kernel.name());
    if !files.iter().any(|file| file.path == GO_TESTS) {
        let outcome = Outcome::Unavailable(go_tests::WITHOUT_GO.to_owned());
        report.push(&suite, "Go tests of project quotas", outcome, Duration::ZERO);
    }
    for name in guest.left_out {
        let outcome = Outcome::Skipped("it runs on the default kernel".to_owned());
        report.push(&suite, name, outcome, Duration::ZERO);
    }
    heard.verdict(&mut report, &suite);
    report
}

#[cfg(test)]
mod tests {
    use testvm::kernel_log::ExpectedLines;

    use super::*;

    /// The cases of the other kernels are kept.
    #[test]
    fn unbootable_kernel_is_one_failed_case() {
        let started = Instant::now();
        let mut report = Report::new();
        report.push("kernel trixie: loopfs", "a test", Outcome::Passed, Duration::ZERO);
        report.append(with_failure(Err(anyhow::anyhow!("it did not boot")), "bookworm", started));
        assert_eq!((report.passed(), report.failed()), (1, 1));
        let failures = report.failures();
        assert!(failures.contains("it did not boot"), "{failures}");
        assert_eq!(report.cases[1].suite, "kernel bookworm");
        let mut passed = Report::new();
        passed.push("kernel sid: loopfs", "a test", Outcome::Passed, Duration::ZERO);
        assert_eq!(with_failure(Ok(passed), "sid", started).failed(), 0);
    }

    #[test]
    fn each_commit_chooses_one_other_kernel() {
        let names = ["old", "default", "new"].map(str::to_owned);
        let shares = |commit| shares(&names, "default", commit);
        for (commit, [second, third]) in [
            (None, [("old", Share::Most), ("new", Share::Most)]),
            (Some(0), [("old", Share::Most), ("new", Share::Differing)]),
            (Some(7), [("new", Share::Most), ("old", Share::Differing)]),
        ] {
            let expected =
                [("default", Share::All), second, third].map(|(name, share)| (name.to_owned(), share));
            assert_eq!(shares(commit), expected, "{commit:?}");
        }
    }

    #[test]
    fn names_that_no_kernel_ran_fail() {
        let mut report = Report::new();
        report.push("kernel trixie: csi", "restart_storm::kills", Outcome::Passed, None);
        report.push("kernel bookworm", "store_model::", Outcome::Skipped("elsewhere".into()), None);
        report.push("kernel bookworm", "machine_faults::", Outcome::NotRun, None);
        require_tests(&["restart_storm::", "store_model::", "machine_faults::"], &mut report);
        let failed = report.cases.iter().filter(|case| matches!(case.outcome, Outcome::Failed(_)));
        assert!(failed.map(|case| &*case.name).eq(["store_model::", "machine_faults::"]), "{report:?}");
    }

    /// A machine is a kernel of the catalogue or belongs to another lane.
    #[test]
    fn expected_lines_are_for_known_machines() {
        let workspace = crate::project::workspace().unwrap();
        let list = workspace.definitions().join("kernels/kernel-log.toml");
        let kernels = Kernel::names(&workspace).unwrap();
        let others = ["sanity", "docker", "bench", "power-cut-work", "power-cut-check", "node-0", "node-1"];
        let known: Vec<String> =
            kernels.iter().map(|name| machine_name(name)).chain(others.map(str::to_owned)).collect();
        for machine in ExpectedLines::read(&list).unwrap().machines() {
            assert!(known.iter().any(|name| name == machine), "{}: {machine}", list.display());
        }
    }
}
