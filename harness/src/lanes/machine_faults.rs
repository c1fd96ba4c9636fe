//! Checks that a machine fails if its kernel logs a fault or one of its disks is corrupt, by a machine with such faults.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::images::debian_program::{self, DASH, DD};
use testvm::images::disk;
use testvm::report::Report;
use testvm::session::Session;
use testvm::test_machine::{TestMachine, data_disk, xfs};
use testvm::vm::ExitReason;
use testvm_guest::spec::{TestBinary, TestsSpec};

use super::machines::{Machines, program};

/// The size of each disk, of which a quarter is in one allocation group.
const DISK_MIB: u64 = 300;
/// The disks: one on which the kernel meets the damage, and one on which only the check at the end does.
const USED: &str = "used";
const UNUSED: &str = "unused";

const WARNING: &str = "WARNING: CPU: 0 PID: 1 at a test of the harness";
const TIMEOUT: Duration = Duration::from_secs(120);

/// The faults, and texts of which each must be in the failure of the machine.
const FAULTS: [(&str, &[&str]); 3] = [
    ("a warning in the kernel's log fails the machine", &["the kernel of faulty logged a fault", WARNING]),
    ("damage that the kernel finds on a disk fails the machine", &["XFS (vda): "]),
    (
        "damage that only xfs_repair finds on a disk fails the machine",
        &["the disk unused: ", "btbno block 1/1"],
    ),
];

/// Returns `true` if all tests run, or a case of this check contains one of the texts.
pub(super) fn is_selected(only: &[String]) -> bool {
    only.is_empty() || FAULTS.iter().any(|(name, _)| only.iter().any(|text| name.contains(text)))
}

/// Boots the machine, and returns a case for each fault.
pub(super) async fn run(session: &Session, machines: &Machines) -> Report {
    let suite = format!("kernel {}: faults", machines.kernel.name());
    let mut report = Report::new();
    let step = session.progress.step("run a machine with faults");
    let ended = async {
        let directory = tempfile::tempdir().context("create a directory")?;
        anyhow::Ok(machine(session, machines, directory.path()).await?.run(&step).await?.ending)
    };
    let ended = ended.await;
    for (name, texts) in FAULTS {
        let ended = ended.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"));
        // One machine has all faults.
        report.record(&suite, name, None, &ended.and_then(|ending| names(ending, texts)));
    }
    report.end(step);
    report
}

/// Checks that a machine failed because of a fault, with these texts.
fn names(ending: &ExitReason, texts: &[&str]) -> Result<()> {
    let ExitReason::Faulty(why) = ending else { anyhow::bail!("no fault was found: {ending:?}") };
    let missing: Vec<_> = texts.iter().filter(|text| !why.contains(**text)).collect();
    anyhow::ensure!(missing.is_empty(), "the failure does not contain {missing:?}: {why}");
    Ok(())
}

async fn machine<'a>(session: &Session, machines: &'a Machines, directory: &Path) -> Result<TestMachine<'a>> {
    let mut disks = Vec::new();
    for name in [USED, UNUSED] {
        let image = directory.join(name);
        disk::xfs(&image, DISK_MIB).await?;
        disk::damage_xfs(&image)?;
        disks.push(data_disk(name, &image));
    }
    let programs = debian_program::files(session, &[&DASH, &DD]).await?;
    let script = format!(
        "echo '<4>{WARNING}' > /dev/kmsg\n\
         # More than the first allocation group has.\n\
         {} if=/dev/zero of=/mnt/{USED}/file bs=1M count={} conv=fsync\n\
         exit 0",
        DD.path(),
        DISK_MIB / 3
    );
    let binary = TestBinary {
        name: "faults".to_owned(),
        path: DASH.path().to_owned(),
        args: vec!["-c".to_owned(), script],
        timeout: TIMEOUT,
        ..TestBinary::default()
    };
    let mounts = [USED, UNUSED].map(|name| xfs(name, &format!("/mnt/{name}"), "defaults")).into();
    let tests = TestsSpec { mounts, binaries: vec![binary], ..TestsSpec::default() };
    let files = programs.into_iter().map(|(path, host)| program(&path, host)).collect();
    let logs = machines.logs.join("faults");
    Ok(TestMachine { logs, ..machines.machine("faulty", files, disks, tests) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that passes, or fails for another reason, has not noticed the fault.
    #[test]
    fn only_faulty_ending_notices_the_fault() {
        assert!(names(&ExitReason::Faulty("a and b".into()), &["a", "b"]).is_ok());
        for ending in [
            ExitReason::Passed,
            ExitReason::Failed("a and b".into()),
            ExitReason::Crashed("a and b".into()),
            ExitReason::Faulty("a".into()),
        ] {
            assert!(names(&ending, &["a", "b"]).is_err(), "{ending:?}");
        }
    }
}
