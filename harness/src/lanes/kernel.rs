//! The kernel lane: `tests/kernel` of each crate that has them, as root on real kernels in QEMU, one after the other,
//! and power cuts.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::libtest::Run;
use super::power_cut;
use crate::guest::report::{End, Message, TestBinaryResult};
use crate::guest::spec::{Mode, Mount, Source, TestBinary, TestsSpec};
use crate::images::disk;
use crate::images::kernel::Kernel;
use crate::packages;
use crate::report::{Outcome, Report};
use crate::rust_build;
use crate::session::Session;
use crate::vm::{self, Disk, DiskMode, Ending, GuestFile, Hypervisor, Vm, VmSpec};

/// The test target and the feature that guards it, the same in every crate that has them.
const TEST: &str = "kernel";
const FEATURE: &str = "kernel-tests";
/// Crates that may have such tests.
const PACKAGES: [&str; 2] = ["loopfs", "csi"];
/// The program of loopfs, which its tests run, and where it is in the guest.
const TOOL: &str = "loopfs";
const TOOL_PATH: &str = "/tests/programs/loopfs";

/// How the data file system of a node is mounted, and so that of the tests.
pub(super) const HARDENED: &str = "nodev,nosuid,noexec";

const BINARY_TIME: Duration = Duration::from_secs(600);
/// A second with hardware help, ten under emulation, more on a busy host.
const BOOT_TIME: Duration = Duration::from_secs(120);
/// Beyond the binaries: to mount, unmount and power off.
const MARGIN: Duration = Duration::from_secs(120);

pub(super) async fn run(session: &Session, kernel: Option<&str>) -> Result<Report> {
    session.until_cancelled(prepare_and_run(session, kernel)).await
}

async fn prepare_and_run(session: &Session, kernel: Option<&str>) -> Result<Report> {
    let kernels = match kernel {
        Some(name) => vec![name.to_owned()],
        None => Kernel::names(session)?,
    };
    packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
    let mut files = Vec::new();
    for package in PACKAGES {
        if !session.workspace.root().join(package).join("tests").join(TEST).is_dir() {
            continue;
        }
        let host = rust_build::test_binary(session, package, TEST, FEATURE).await?;
        files.push(GuestFile { path: format!("/tests/{package}"), mode: 0o755, host });
    }
    let power_cut = rust_build::test_binary(session, "loopfs", power_cut::TEST, FEATURE).await?;
    let tool = rust_build::tested_program(session, "loopfs", TEST, FEATURE, TOOL).await?;
    files.push(GuestFile { path: TOOL_PATH.to_owned(), mode: 0o755, host: tool });
    let init = rust_build::guest_programs(session).await?.init;
    let mut report = Report::new();
    for name in kernels {
        let kernel = Kernel::prepare(session, Some(&name)).await?;
        let hypervisor = vm::choose(session, &kernel, &init).await?;
        let logs = session.workspace.reports("test").join(format!("kernel-{}", kernel.name()));
        clear(&logs)?;
        report.append(run_on(session, &kernel, &hypervisor, &init, &files, &logs).await?);
        let machine = power_cut::Machine {
            kernel: &kernel,
            hypervisor: &hypervisor,
            init: &init,
            program: &power_cut,
            logs: &logs,
        };
        report.append(power_cut::run(session, &machine).await);
    }
    Ok(report)
}

async fn run_on(
    session: &Session,
    kernel: &Kernel,
    hypervisor: &Hypervisor,
    init: &Path,
    files: &[GuestFile],
    logs: &Path,
) -> Result<Report> {
    let scratch = tempfile::tempdir().context("make a directory")?;
    let data = scratch.path().join("data.xfs");
    disk::xfs(&data, 1024).await?;
    let plain = scratch.path().join("plain.xfs");
    disk::xfs(&plain, 512).await?;
    let initramfs = scratch.path().join("initramfs");
    let modules = kernel.modules(&["boot", "tests"]).await?;
    vm::initramfs(&initramfs, init, &modules, files, Mode::Tests(tests(files)))?;

    let step = session.progress.step(format!(
        "run the tests on Linux {} ({})",
        kernel.release(),
        hypervisor.accelerator
    ));
    let mut vm = Vm::start(&VmSpec {
        name: format!("kernel-{}", kernel.name()),
        hypervisor: hypervisor.clone(),
        kernel: kernel.vmlinuz(),
        initramfs,
        kernel_args: Vec::new(),
        memory_mib: 2048,
        cpus: 2,
        disks: vec![scratch_disk("data", &data), scratch_disk("plain", &plain)],
        network: false,
        forwards: Vec::new(),
        logs: logs.to_owned(),
    })
    .await?;
    if let Err(error) = vm.wait_started(BOOT_TIME).await {
        step.failed("it did not boot");
        return Err(error);
    }
    let mut results = Vec::new();
    let listen = async {
        while let Some(message) = vm.next_message().await {
            match message {
                Message::Started { kernel } => step.note(format!("Linux {kernel} is up")),
                Message::TestBinary(result) => results.push(result),
                _ => {}
            }
        }
    };
    let deadline = MARGIN + BINARY_TIME * u32::try_from(files.len()).unwrap_or(1);
    let heard = tokio::time::timeout(deadline, listen).await;
    let ending = match heard {
        Ok(()) => vm.wait_ended(Duration::from_secs(10)).await?,
        Err(_) => Ending::Crashed(format!("it did not end within {deadline:?}")),
    };

    let report = evaluate(kernel, files, &results, &ending, logs)?;
    if report.succeeded() {
        step.done(report.summary())
    } else {
        step.failed(report.summary())
    }
    Ok(report)
}

fn scratch_disk(name: &str, image: &Path) -> Disk {
    Disk { name: name.to_owned(), image: image.to_owned(), mode: DiskMode::Scratch }
}

/// What the tests find, by the names the crates know.
fn tests(files: &[GuestFile]) -> TestsSpec {
    let xfs = |disk: &str, target: &str, options: String| Mount {
        source: Source::Disk(disk.to_owned()),
        target: target.to_owned(),
        fs_type: "xfs".to_owned(),
        options,
    };
    let env = [
        ("LOOPFS_TEST_XFS", "/mnt/xfs"),
        ("LOOPFS_TEST_XFS_NOQUOTA", "/mnt/xfs-noquota"),
        ("LOOPFS_TEST_SCRATCH", "/tmp"),
        ("LOOPFS_TEST_TOOL", TOOL_PATH),
    ];
    TestsSpec {
        mounts: vec![
            xfs("data", "/mnt/xfs", format!("prjquota,{HARDENED}")),
            xfs("plain", "/mnt/xfs-noquota", HARDENED.to_owned()),
        ],
        env: env
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        binaries: test_binaries(files)
            .map(|file| TestBinary {
                name: binary_name(file).to_owned(),
                path: file.path.clone(),
                // Loop devices and quotas are the kernel's, and there is one kernel.
                args: vec!["--test-threads=1".to_owned()],
                env: BTreeMap::new(),
                timeout: BINARY_TIME,
            })
            .collect(),
    }
}

fn test_binaries(files: &[GuestFile]) -> impl Iterator<Item = &GuestFile> {
    files.iter().filter(|file| file.path != TOOL_PATH)
}

fn binary_name(file: &GuestFile) -> &str {
    file.path.rsplit('/').next().unwrap_or(&file.path)
}

fn evaluate(
    kernel: &Kernel,
    files: &[GuestFile],
    results: &[TestBinaryResult],
    ending: &Ending,
    logs: &Path,
) -> Result<Report> {
    let mut report = Report::new();
    anyhow::ensure!(test_binaries(files).next().is_some(), "no crate has tests/{TEST}");
    for file in test_binaries(files) {
        let name = binary_name(file);
        let suite = format!("kernel {}: {name}", kernel.name());
        let output = std::fs::read_to_string(logs.join(format!("{name}.log"))).unwrap_or_default();
        let (ended_well, time) = match results.iter().find(|result| result.name == name) {
            Some(result) => (ended_well(&result.end), result.time),
            None => (Err("it did not end, for the machine did".to_owned()), Duration::ZERO),
        };
        Run::parse(&output).report(&mut report, &suite, ended_well, time);
    }
    // The guest's verdict adds nothing when a test failed, and everything when none did.
    match ending {
        Ending::Passed => {}
        Ending::Failed(_) if report.failed() > 0 => {}
        Ending::Failed(why) | Ending::Crashed(why) => {
            let suite = format!("kernel {}", kernel.name());
            report.push(&suite, "the virtual machine", Outcome::Failed(why.clone()), Duration::ZERO);
        }
    }
    Ok(report)
}

fn ended_well(end: &End) -> Result<(), String> {
    match end {
        End::Exited(0) => Ok(()),
        End::Exited(code) => Err(format!("it exited with {code}")),
        End::Signalled(signal) => Err(format!("it was killed by {signal}")),
        End::TimedOut => Err(format!("it ran longer than {BINARY_TIME:?}")),
        End::NotStarted(why) => Err(why.clone()),
    }
}

/// Logs of an earlier run would be read as this one's.
fn clear(directory: &Path) -> Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}
