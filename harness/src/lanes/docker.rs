//! The docker lane: the driver's image in a Docker engine, in a virtual machine. The tests run beside the engine and start
//! containers with testcontainers.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::images::disk;
use testvm::images::kernel::Kernel;
use testvm::images::kind::Description;
use testvm::report::Report;
use testvm::session::Session;
use testvm::vm::{Disk, DiskMode, Vm};
use testvm::{cache, packages};
use testvm_cluster::ContainerImage;
use testvm_cluster::docker::{DOCKER_DISK, Devices, DockerMachine, bash};
use testvm_guest::spec::Mount;

use super::libtest::Run;
use crate::builds::{self, ProgramProfile};
use crate::nodes;

const SUITE: &str = "docker: csi";
const TEST: &str = "engine";

/// The directory of the disk with the tests and the image.
const PAYLOAD: &str = "/opt/tests";
const PAYLOAD_DISK: &str = "payload";
const ARCHIVE: &str = "driver.tar";
/// The data file systems: their disks, mount points and options. Only the first has project quotas.
const DATA: [(&str, &str, &str); 2] = [
    ("data", "/mnt/xfs", "prjquota,nodev,nosuid,noexec"),
    ("plain", "/mnt/xfs-noquota", "nodev,nosuid,noexec"),
];
const DATA_MIB: u64 = 320;
const DOCKER_MIB: u64 = 1024;
/// The memory of the machine: Docker, and one container at a time.
const MEMORY_MIB: u32 = 2048;

/// The prefix of the lines in which a test prints the message of a driver that lacks something.
const MESSAGE_PREFIX: &str = "without ";

const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// The limit of all tests. They take a minute on an idle host.
const TESTS_TIMEOUT: Duration = Duration::from_secs(600);
/// The time from SIGTERM to SIGKILL for tests that have reached the limit.
const KILL_AFTER: Duration = Duration::from_secs(5);
/// Prints the logs of all containers.
const CONTAINER_LOGS: &str = "for container in $(docker ps --all --quiet); do
    docker inspect --format '==> {{.Name}} {{.State.Status}} {{.State.ExitCode}}' $container
    docker logs $container 2>&1
done";
/// The time for these logs.
const LOGS_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs all tests, or those whose names contain one of `only`.
pub(super) async fn run(session: &Session, only: &[String]) -> Result<Report> {
    packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
    let tests = builds::guest_tests(session).await?.test("csi", TEST)?;
    let driver = builds::driver_programs(session, ProgramProfile::Test).await?;
    let image = nodes::driver_image(driver);
    let init = builds::guest_programs(session).await?.init;
    let kernel = Kernel::prepare(session, None).await?;
    let root = Description::read(session)?.machine_root(session, &kernel).await?;
    let machine = DockerMachine::prepare(session, &kernel, root, init).await?;

    let logs = session.workspace.reports("test").join("docker");
    // The logs of an earlier run must not be read as those of this run.
    cache::empty_dir(&logs)?;
    let directory = tempfile::tempdir().context("create a directory")?;
    let devices = devices(directory.path(), tests, &image, logs.clone()).await?;
    let _processor = session.processor().await;
    let step = session.progress.step("run the tests of the image in a Docker engine");
    let vm = machine.boot(devices, directory.path()).await?;
    step.note("testing");
    let mut report = Report::new();
    let tested = test(session, &vm, only, &logs, &mut report).await;
    // Also after an error the machine is stopped in order, so that the logs are complete.
    report.run(SUITE, "stop the machine", vm.power_off()).await;
    tested?;
    report.end(step);
    Ok(report)
}

/// Creates the disks of the machine in `directory`.
async fn devices(
    directory: &Path,
    tests: PathBuf,
    driver: &ContainerImage,
    logs: PathBuf,
) -> Result<Devices> {
    let path = |name: &str| directory.join(name);
    let archive = driver.write(directory)?;
    disk::payload(&path(PAYLOAD_DISK), &[("engine".to_owned(), tests), (ARCHIVE.to_owned(), archive)])
        .await?;
    disk::empty_ext4(&path(DOCKER_DISK), DOCKER_MIB).await?;
    let disk = |name: &str, mode| Disk { name: name.to_owned(), image: path(name), mode };
    let mut disks = vec![disk(DOCKER_DISK, DiskMode::Scratch), disk(PAYLOAD_DISK, DiskMode::ReadOnly)];
    let mut mounts = vec![Mount::of_disk(PAYLOAD_DISK, PAYLOAD, "ext4", "ro")];
    for (name, target, options) in DATA {
        disk::xfs(&path(name), DATA_MIB).await?;
        disks.push(disk(name, DiskMode::Persistent));
        mounts.push(Mount::of_disk(name, target, "xfs", options));
    }
    Ok(Devices { disks, mounts, forwards: Vec::new(), memory_mib: MEMORY_MIB, logs })
}

async fn test(session: &Session, vm: &Vm, only: &[String], logs: &Path, report: &mut Report) -> Result<()> {
    bash(vm.control(), &format!("docker load --quiet --input {PAYLOAD}/{ARCHIVE}"), LOAD_TIMEOUT).await?;
    // The machine itself ends tests that take too long, so that the host gets their output until then, with the name of the test that hangs.
    // The loop devices belong to the kernel, which all tests share. --show-output prints the lines with MESSAGE_PREFIX.
    let [quota, plain] = DATA.map(|(_, target, _)| target);
    let program = format!(
        "timeout --kill-after={} {} env LOOPFS_TEST_XFS={quota} LOOPFS_TEST_XFS_NOQUOTA={plain} {PAYLOAD}/engine --test-threads=1 \
         --show-output",
        KILL_AFTER.as_secs(),
        TESTS_TIMEOUT.as_secs()
    );
    let words = program.split(' ').chain(only.iter().map(String::as_str));
    let output = vm.control().exec(words, TESTS_TIMEOUT + KILL_AFTER).await?;
    store(&logs.join("tests.log"), &format!("{}{}", output.stdout, output.stderr))?;
    for line in output.stdout.lines().filter(|line| line.starts_with(MESSAGE_PREFIX)) {
        session.progress.line(line);
    }
    let ended_well = match output.code {
        0 => Ok(()),
        124 | 137 => Err(format!("it did not end within {TESTS_TIMEOUT:?}")),
        code => Err(format!("exit code {code}")),
    };
    Run::parse(&output.stdout).report(report, SUITE, ended_well, only);
    if !report.succeeded() {
        // A test removes its container, unless it was killed.
        let printed = bash(vm.control(), CONTAINER_LOGS, LOGS_TIMEOUT).await;
        store(&logs.join("containers.log"), &printed.unwrap_or_else(|error| format!("{error:#}\n")))?;
    }
    Ok(())
}

fn store(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
