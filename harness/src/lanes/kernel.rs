//! The kernel lane: `tests/kernel` of each crate that has them, as root on real kernels in QEMU, as many
//! concurrently as this machine has processors. It also simulates power cuts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::StreamExt;
use testvm::images::debian_program::{self, DebianProgram, LOSETUP, MKFS_EXT4, MKFS_XFS};
use testvm::images::disk;
use testvm::images::kernel::Kernel;
use testvm::packages;
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::test_machine::{GuestResults, HARDENED, data_disk, xfs};
use testvm::vm::GuestFile;
use testvm_guest::spec::{TestBinary, TestsSpec};

use super::libtest::Run;
use super::machines::{Machines, program};
use super::passes::with_failure;
use super::seed::{self, Source};
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
const GO_TESTS: &str = "kubelet-quota";

/// The variable with the number of random operations of a test.
const STEPS: &str = "LOOPFS_TEST_STEPS";

/// Tests that take long and whose results depend on the number of volumes, files, calls or devices, or on the driver, rather than on
/// the kernel. Unless they are named, CI runs them on the default kernel only.
const ON_ONE_KERNEL: [&str; 7] = [
    "control::",
    "directory_copies::",
    "inode_space::",
    "many_devices::",
    "restart_storm::",
    "rpc_table::",
    "store_model::",
];

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
    /// All tests on the default kernel and on one of the others, which the seed chooses, and [`KERNELS_DIFFER`] on the rest.
    OfTheSeed,
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
    let source = if matches!(kernels, Kernels::All) { Source::Clock } else { Source::Commit };
    let seed = seed::choose(session, "kernel", source).await?;
    let directory = tempfile::tempdir().context("make a directory")?;
    let programs = Programs::build(session, directory.path());
    let (programs, ()) = tokio::try_join!(programs, packages::ensure(session, packages::VIRTUAL_MACHINE))?;
    let names = Kernel::names(&session.workspace)?;
    let default = Kernel::default_name(session)?;
    let shares = match kernels {
        Kernels::One(name) => vec![(name.to_owned(), Share::All)],
        Kernels::OfTheSeed if only.is_empty() => shares(&names, &default, seed),
        // A test that is named runs everywhere.
        Kernels::OfTheSeed | Kernels::All => names.into_iter().map(|name| (name, Share::All)).collect(),
    };
    let tested = futures::stream::iter(&shares).map(async |(name, share)| {
        let _processor = session.processor().await;
        let started = Instant::now();
        let result = test(session, name, &programs, *share, only, seed).await;
        with_failure(result, &suite(name), "run the tests", started)
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

/// Returns the kernels with their shares, the default kernel first: its share takes longest.
fn shares(names: &[String], default: &str, seed: u64) -> Vec<(String, Share)> {
    let others: Vec<&String> = names.iter().filter(|name| *name != default).collect();
    let chosen = seed % others.len().max(1) as u64;
    let share = |index| if chosen == index { Share::Most } else { Share::Differing };
    let of_others = (0..).zip(others).map(|(index, name)| (name.clone(), share(index)));
    let mut shares: Vec<_> = std::iter::once((default.to_owned(), Share::All)).chain(of_others).collect();
    shares.sort_by_key(|(_, share)| *share as u8);
    shares
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
        let (tests, guest) = tokio::try_join!(builds::guest_tests(session), builds::guest_programs(session))?;
        let mut files = Vec::new();
        for package in PACKAGES {
            files.push(program(&test_path(package), tests.test(package, TEST)?));
        }
        if go_tests::is_installed() {
            files.push(program(&test_path(GO_TESTS), go_tests::kernel_tests(session, directory).await?));
        }
        let power_cut = tests.test("loopfs", power_cut::TEST)?;
        files.push(program(TOOL_PATH, tests.program(TOOL)?));
        for name in builds::examples(session)? {
            files.push(program(&format!("{EXAMPLES}/{name}"), tests.program(&name)?));
        }
        let debian = debian_program::files(session, &DEBIAN_PROGRAMS.each_ref()).await?;
        files.extend(debian.into_iter().map(|(path, host)| program(&path, host)));
        Ok(Programs { init: guest.init, files, power_cut })
    }
}

/// Runs all tests on one kernel.
async fn test(
    session: &Session,
    kernel: &str,
    programs: &Programs,
    share: Share,
    only: &[String],
    seed: u64,
) -> Result<Report> {
    let Programs { init, files, power_cut } = programs;
    let machines = Machines::prepare(session, Some(kernel), init, &machine_name(kernel)).await?;
    // They run on another kernel.
    let left_out: &[&str] = if share == Share::Most { &ON_ONE_KERNEL } else { &[] };
    let differing = KERNELS_DIFFER.map(str::to_owned);
    let selected = if share == Share::Differing { &differing } else { only };
    let mut report = run_on(session, &machines, files, selected, left_out, seed).await?;
    if share == Share::Differing {
        let why = "another seed runs them on this kernel; --lane extended --only kernels runs all on each";
        report.push(&suite(kernel), "all other tests", Outcome::Skipped(why.to_owned()), None);
        return Ok(report);
    }
    if share == Share::All && machine_faults::is_selected(only) {
        report.append(machine_faults::run(session, &machines).await);
    }
    if only.is_empty() {
        report.append(power_cut::run(session, &machines, power_cut, seed).await);
    }
    Ok(report)
}

async fn run_on(
    session: &Session,
    machines: &Machines,
    files: &[GuestFile],
    only: &[String],
    left_out: &[&str],
    seed: u64,
) -> Result<Report> {
    let directory = tempfile::tempdir().context("make a directory")?;
    let data = directory.path().join("data.xfs");
    disk::xfs(&data, 1024).await?;
    let plain = directory.path().join("plain.xfs");
    disk::xfs(&plain, 512).await?;
    let disks = vec![data_disk("data", &data), data_disk("plain", &plain)];
    let name = machine_name(machines.kernel.name());
    let machine = machines.machine(&name, files.to_vec(), disks, tests(files, only, left_out, seed));
    let step = session.progress.step(format!("run the tests on {}", machines.title()));
    let heard = machine.run(&step).await?;
    let report = evaluate(machines, files, only, left_out, &heard);
    match report.failed() {
        // Whether a test that this kernel is too old for runs on another one is known at the end.
        0 => step.done(report.summary()),
        _ => step.failed(report.summary()),
    }
    Ok(report)
}

/// Returns the specification of the tests. The crates define the names in it.
fn tests(files: &[GuestFile], only: &[String], left_out: &[&str], seed: u64) -> TestsSpec {
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
            .chain(seed::variables(seed))
            .chain(std::env::var(STEPS).ok().map(|steps| (STEPS.to_owned(), steps)))
            .collect::<BTreeMap<_, _>>(),
        binaries: test_binaries(files)
            .map(|name| TestBinary {
                name: name.to_owned(),
                path: test_path(name),
                args: if name == GO_TESTS { go_tests::arguments(only) } else { args.clone() },
                timeout: if std::env::var_os(STEPS).is_some() { LONG_TIMEOUT } else { BINARY_TIMEOUT },
                ..TestBinary::default()
            })
            .collect(),
        ..TestsSpec::default()
    }
}

fn test_path(name: &str) -> String {
    format!("/tests/{name}")
}

/// Returns the names of the test binaries among these files.
fn test_binaries(files: &[GuestFile]) -> impl Iterator<Item = &'static str> {
    let names = PACKAGES.into_iter().chain([GO_TESTS]);
    names.filter(|name| files.iter().any(|file| file.path == test_path(name)))
}

fn evaluate(
    machines: &Machines,
    files: &[GuestFile],
    only: &[String],
    left_out: &[&str],
    heard: &GuestResults,
) -> Report {
    let kernel = machines.kernel.name();
    let mut report = Report::new();
    for name in test_binaries(files) {
        let suite = format!("kernel {kernel}: {name}");
        let output = std::fs::read_to_string(machines.logs.join(format!("{name}.log"))).unwrap_or_default();
        let ended_well = heard.ended_well(name).0;
        let run = if name == GO_TESTS {
            go_tests::parse(&output)
        } else {
            Run::parse_timed(&output, heard.line_times(name))
        };
        run.report(&mut report, &suite, ended_well, only);
    }
    let suite = suite(kernel);
    if !test_binaries(files).any(|name| name == GO_TESTS) {
        let outcome = Outcome::Unavailable(go_tests::WITHOUT_GO.to_owned());
        report.push(&suite, "Go tests of project quotas", outcome, None);
    }
    for name in left_out {
        let outcome = Outcome::Skipped("it runs on the default kernel".to_owned());
        report.push(&suite, name, outcome, None);
    }
    heard.verdict(&mut report, &suite);
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_seed_chooses_one_other_kernel() {
        let names = ["old", "default", "new"].map(str::to_owned);
        let shares = |seed| shares(&names, "default", seed);
        for (seed, [second, third]) in [
            (0, [("old", Share::Most), ("new", Share::Differing)]),
            (7, [("new", Share::Most), ("old", Share::Differing)]),
        ] {
            let expected =
                [("default", Share::All), second, third].map(|(name, share)| (name.to_owned(), share));
            assert_eq!(shares(seed), expected, "{seed}");
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
}
