//! A benchmark inside a virtual machine, for what this machine's kernel or user cannot.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::measurement::Environment;
use crate::cache;
use crate::guest::report::{End, Message};
use crate::guest::spec::{TestBinary, TestsSpec};
use crate::images::disk;
use crate::images::kernel::Kernel;
use crate::process::tail;
use crate::session::Session;
use crate::test_machine::{HARDENED, TestMachine, scratch, xfs};
use crate::vm::{self, ExitReason, GuestFile};
use crate::{builds, packages};

/// Where the guest has an empty XFS with project quotas.
pub(super) const XFS: &str = "/mnt/xfs";

/// Enough for most, in MiB.
pub(super) const DISK_MIB: u64 = 4096;

const NAME: &str = "bench";
/// Under emulation; hardware help is ten times as fast.
const TIME: Duration = Duration::from_secs(1800);
/// How often the last line of the program is shown.
const GLANCE: Duration = Duration::from_secs(1);

/// Runs `program` once for each of `runs`, which are its arguments, in one boot of a guest that has the files `beside` and an
/// empty file system of `disk_mib`, of which the host keeps only what is written.
pub(super) async fn run(
    session: &Session,
    kernel: Option<&str>,
    program: &Path,
    beside: Vec<GuestFile>,
    runs: &[Vec<String>],
    disk_mib: u64,
) -> Result<Vec<Environment>> {
    packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
    let kernel = Kernel::prepare(session, kernel).await?;
    let init = builds::guest_programs(session).await?.init;
    let hypervisor = vm::choose(session, &kernel, &init).await?;
    let place = format!("virtual machine ({})", hypervisor.accelerator);
    let logs = session.workspace.reports("bench").join("guest");
    // An earlier run's would be read as this one's.
    cache::remove_dir(&logs)?;
    let directory = tempfile::tempdir().context("make a directory")?;
    let data = directory.path().join("data.xfs");
    disk::xfs(&data, disk_mib).await?;
    let file = GuestFile { path: format!("/tests/{NAME}"), mode: 0o755, host: program.to_owned() };
    let tests = TestsSpec {
        mounts: vec![xfs("data", XFS, &format!("prjquota,{HARDENED}"))],
        binaries: runs.iter().enumerate().map(|(number, args)| binary(number, &file, args)).collect(),
        ..TestsSpec::default()
    };

    let files = std::iter::once(file).chain(beside).collect();
    let step = session.progress.step(format!("measure on Linux {} in a {place}", kernel.release()));
    let machine = TestMachine {
        name: NAME.to_owned(),
        kernel: &kernel,
        hypervisor: &hypervisor,
        init: &init,
        files,
        memory_mib: 4096,
        disks: vec![scratch("data", &data)],
        tests,
        logs: logs.clone(),
    };
    let mut vm = machine.boot().await?;
    let mut ended = Vec::new();
    let listen = async {
        let mut glance = tokio::time::interval(GLANCE);
        loop {
            tokio::select! {
                message = vm.next_message() => match message {
                    Some(Message::TestBinary(result)) => ended.push(result),
                    Some(_) => {}
                    None => return,
                },
                _ = glance.tick() => step.note(tail(&output(&logs, ended.len()), 1)),
            }
        }
    };
    let heard = session.until_cancelled(async { Ok(tokio::time::timeout(TIME, listen).await) }).await?;
    heard.with_context(|| format!("the virtual machine did not end within {TIME:?}"))?;
    let ending = vm.wait_ended(Duration::from_secs(10)).await?;

    let mut parts = Vec::new();
    for number in 0..runs.len() {
        let output = output(&logs, number);
        let well = ended.get(number).is_some_and(|result| result.end == End::Exited(0));
        anyhow::ensure!(well, "in the virtual machine: {ending:?}\n{}", tail(&output, 10));
        parts.push(Environment::parse(&place, &output)?);
    }
    anyhow::ensure!(ending == ExitReason::Passed, "the virtual machine did not end well: {ending:?}");
    step.done("");
    Ok(parts)
}

fn binary(number: usize, file: &GuestFile, args: &[String]) -> TestBinary {
    TestBinary {
        name: log_name(number),
        path: file.path.clone(),
        args: args.to_vec(),
        env: BTreeMap::new(),
        report: None,
        timeout: TIME,
    }
}

fn log_name(number: usize) -> String {
    format!("{NAME}-{number}")
}

/// What a run has printed so far.
fn output(logs: &Path, number: usize) -> String {
    std::fs::read_to_string(logs.join(format!("{}.log", log_name(number)))).unwrap_or_default()
}
