//! Runs a benchmark in a virtual machine, if this machine's kernel or the user's rights do not suffice.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::images::disk;
use testvm::images::kernel::Kernel;
use testvm::process::tail;
use testvm::session::Session;
use testvm::test_machine::{HARDENED, TestMachine, data_disk, xfs};
use testvm::vm::{self, ExitReason, GuestFile};
use testvm::{cache, packages};
use testvm_guest::report::{End, Message};
use testvm_guest::spec::{TestBinary, TestsSpec};

use super::measurement::Environment;
use crate::builds;

/// The mount point of an empty XFS with project quotas in the guest.
pub(super) const XFS: &str = "/mnt/xfs";

/// The default size of the disk in MiB.
pub(super) const DISK_MIB: u64 = 4096;

const NAME: &str = "bench";
/// The timeout under emulation. Hardware virtualisation is ten times as fast.
const TIMEOUT: Duration = Duration::from_secs(1800);
/// The interval at which progress shows the last line of the program.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Runs `program` once for each element of `runs`, its arguments, in one boot of a guest. The guest has the programs `beside`, by their
/// paths there and on the host, and an empty file system of `disk_mib`, which is sparse on the host.
pub(super) async fn run(
    session: &Session,
    kernel: Option<&str>,
    program: &Path,
    beside: BTreeMap<String, PathBuf>,
    runs: &[Vec<String>],
    disk_mib: u64,
) -> Result<Vec<Environment>> {
    packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
    let kernel = Kernel::prepare(session, kernel).await?;
    let init = builds::guest_programs(session).await?.init;
    let hypervisor = vm::choose(session, &kernel, &init).await?;
    let place = format!("virtual machine ({})", hypervisor.accelerator);
    let logs = session.workspace.reports("bench").join("guest");
    // The logs of an earlier run must not be read as those of this run.
    cache::remove_dir(&logs)?;
    let directory = tempfile::tempdir().context("create a temporary directory")?;
    let data = directory.path().join("data.xfs");
    disk::xfs(&data, disk_mib).await?;
    let executable = |(path, host)| GuestFile { path, host };
    let file = executable((format!("/tests/{NAME}"), program.to_owned()));
    let binary = |(number, args): (usize, &Vec<String>)| TestBinary {
        name: log_name(number),
        path: file.path.clone(),
        args: args.clone(),
        timeout: TIMEOUT,
        ..TestBinary::default()
    };
    let tests = TestsSpec {
        mounts: vec![xfs("data", XFS, &format!("prjquota,{HARDENED}"))],
        binaries: runs.iter().enumerate().map(binary).collect(),
        ..TestsSpec::default()
    };

    let files = std::iter::once(file).chain(beside.into_iter().map(executable)).collect();
    let step = session.progress.step(format!("measure on Linux {} in a {place}", kernel.release()));
    let machine = TestMachine {
        name: NAME.to_owned(),
        kernel: &kernel,
        hypervisor: &hypervisor,
        init: &init,
        files,
        memory_mib: 4096,
        disks: vec![data_disk("data", &data)],
        tests,
        logs: logs.clone(),
    };
    let mut vm = machine.boot().await?;
    let mut ended = Vec::new();
    let listen = async {
        let mut interval = tokio::time::interval(PROGRESS_INTERVAL);
        loop {
            tokio::select! {
                message = vm.next_message() => match message {
                    Some(Message::TestBinary(result)) => ended.push(result),
                    Some(_) => {}
                    None => return,
                },
                _ = interval.tick() => step.note(tail(&output(&logs, ended.len()), 1)),
            }
        }
    };
    let heard = session.until_cancelled(async { Ok(tokio::time::timeout(TIMEOUT, listen).await) }).await?;
    heard.with_context(|| format!("the virtual machine did not end within {TIMEOUT:?}"))?;
    let ending = vm.wait_ended(Duration::from_secs(10)).await?;

    let mut parts = Vec::new();
    for number in 0..runs.len() {
        let output = output(&logs, number);
        let well = ended.get(number).is_some_and(|result| result.end == End::Exited(0));
        anyhow::ensure!(well, "in the virtual machine: {ending:?}\n{}", tail(&output, 10));
        parts.push(Environment::parse(&place, &output)?);
    }
    anyhow::ensure!(ending == ExitReason::Passed, "the virtual machine did not exit cleanly: {ending:?}");
    step.done("");
    Ok(parts)
}

fn log_name(number: usize) -> String {
    format!("{NAME}-{number}")
}

/// Returns the output of a run so far.
fn output(logs: &Path, number: usize) -> String {
    std::fs::read_to_string(logs.join(format!("{}.log", log_name(number)))).unwrap_or_default()
}
