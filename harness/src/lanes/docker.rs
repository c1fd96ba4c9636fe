//! The docker lane: the driver's image in a Docker engine, in a virtual machine. The tests run beside the engine and start
//! containers with testcontainers.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testvm::cache;
use testvm::images::kernel::Kernel;
use testvm::images::kind::Description;
use testvm::images::{disk, oci};
use testvm::packages;
use testvm::report::Report;
use testvm::rust_build;
use testvm::session::Session;
use testvm::vm::{Disk, DiskMode, Vm};
use testvm_cluster::docker::{DOCKER_DISK, Devices, DockerMachine, bash};
use testvm_guest::spec::{Mount, Source};

use super::libtest::Run;
use crate::builds;
use crate::nodes::DRIVER;

const SUITE: &str = "docker: csi";
const TEST: &str = "engine";
const FEATURE: &str = "engine-tests";

/// The directory of the disk with the tests and the image.
const PAYLOAD: &str = "/opt/tests";
const PAYLOAD_DISK: &str = "payload";
/// The data file systems: their disks, mount points and options. Only the first has project quotas.
const DATA: [(&str, &str, &str); 2] = [
    ("data", "/mnt/xfs", "prjquota,nodev,nosuid,noexec"),
    ("plain", "/mnt/xfs-noquota", "nodev,nosuid,noexec"),
];
const DATA_MIB: u64 = 320;
const DOCKER_MIB: u64 = 1024;

/// The prefix of the lines in which a test prints what a driver says that lacks something.
const REFUSED: &str = "without ";

const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
const TESTS_TIMEOUT: Duration = Duration::from_secs(600);

/// Runs all tests, or those whose names contain one of `only`.
pub(super) async fn run(session: &Session, only: &[String]) -> Result<Report> {
    session.until_cancelled(prepare_and_run(session, only)).await
}

async fn prepare_and_run(session: &Session, only: &[String]) -> Result<Report> {
    packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
    let tests = rust_build::test_binary(session, "csi", TEST, FEATURE).await?;
    let driver = builds::driver_programs(session).await?.csi;
    let init = builds::guest_programs(session).await?.init;
    let kernel = Kernel::prepare(session, None).await?;
    let root = Description::read(session)?.machine_root(session, &kernel).await?;
    let machine = DockerMachine::prepare(session, &kernel, root, init).await?;

    let logs = session.workspace.reports("test").join("docker");
    // The logs of an earlier run must not be read as those of this run.
    cache::remove_dir(&logs)?;
    fs::create_dir_all(&logs).with_context(|| format!("create {}", logs.display()))?;
    let directory = tempfile::tempdir().context("create a directory")?;
    let devices = devices(directory.path(), tests, &driver, logs.clone()).await?;
    let step = session.progress.step("run the tests of the image in a Docker engine");
    let vm = machine.boot(devices, directory.path()).await?;
    step.note("testing");
    let report = test(session, &vm, only, &logs).await;
    vm.power_off().await?;
    let report = report?;
    if report.succeeded() {
        step.done(report.summary());
    } else {
        step.failed(report.summary());
    }
    Ok(report)
}

/// Creates the disks of the machine in `directory`.
async fn devices(directory: &Path, tests: PathBuf, driver: &Path, logs: PathBuf) -> Result<Devices> {
    let path = |name: &str| directory.join(name);
    let archive = path("loopfs.tar");
    oci::archive(&archive, DRIVER, &[("/loopfs-csi", driver)])?;
    disk::payload(&path(PAYLOAD_DISK), &[("engine".to_owned(), tests), ("loopfs.tar".to_owned(), archive)])
        .await?;
    disk::empty_ext4(&path(DOCKER_DISK), DOCKER_MIB).await?;
    let disk = |name: &str, mode| Disk { name: name.to_owned(), image: path(name), mode };
    let mount = |name: &str, target: &str, fs_type: &str, options: &str| Mount {
        source: Source::Disk(name.to_owned()),
        target: target.to_owned(),
        fs_type: fs_type.to_owned(),
        options: options.to_owned(),
    };
    let mut disks = vec![disk(DOCKER_DISK, DiskMode::Scratch), disk(PAYLOAD_DISK, DiskMode::ReadOnly)];
    let mut mounts = vec![mount(PAYLOAD_DISK, PAYLOAD, "ext4", "ro")];
    for (name, target, options) in DATA {
        disk::xfs(&path(name), DATA_MIB).await?;
        disks.push(disk(name, DiskMode::Scratch));
        mounts.push(mount(name, target, "xfs", options));
    }
    Ok(Devices { disks, mounts, forwards: Vec::new(), logs })
}

async fn test(session: &Session, vm: &Vm, only: &[String], logs: &Path) -> Result<Report> {
    bash(vm.control(), &format!("docker load --quiet --input {PAYLOAD}/loopfs.tar"), LOAD_TIMEOUT).await?;
    let [quota, plain] = DATA.map(|(_, target, _)| target);
    let program = [
        "env".to_owned(),
        format!("LOOPFS_TEST_XFS={quota}"),
        format!("LOOPFS_TEST_XFS_NOQUOTA={plain}"),
        format!("{PAYLOAD}/engine"),
        // The loop devices belong to the kernel, which all tests share.
        "--test-threads=1".to_owned(),
        // What each refused start said.
        "--show-output".to_owned(),
    ];
    let started = Instant::now();
    let output = vm.control().exec(program.iter().chain(only), TESTS_TIMEOUT).await?;
    let path = logs.join("tests.log");
    fs::write(&path, format!("{}{}", output.stdout, output.stderr))
        .with_context(|| format!("write {}", path.display()))?;
    for line in output.stdout.lines().filter(|line| line.starts_with(REFUSED)) {
        session.progress.line(line);
    }
    let ended = if output.code == 0 { Ok(()) } else { Err(format!("exit code {}", output.code)) };
    let mut report = Report::new();
    Run::parse(&output.stdout).report(&mut report, SUITE, ended, started.elapsed());
    Ok(report)
}
