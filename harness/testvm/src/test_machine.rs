//! A virtual machine that runs test binaries and then ends, for the lanes and benchmarks that need one.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testvm_guest::report::{End, Message, TestBinaryResult};
use testvm_guest::spec::{Mode, Mount, TestsSpec};

use crate::images::kernel::Kernel;
use crate::progress::Step;
use crate::report::{Outcome, Report};
use crate::vm::{self, Disk, DiskMode, ExitReason, GuestFile, Hypervisor, LineTimes, Vm, VmSpec};

/// The mount options of a node's data file system, and so of the tests' file systems.
pub const HARDENED: &str = "nodev,nosuid,noexec";

/// The timeout of a boot, which takes a second with hardware virtualisation, ten with emulation, and more on
/// a busy host.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// The case about the machine itself: it ended in order, its kernel logged no fault, and its disks are consistent.
pub const MACHINE: &str = "the virtual machine, its kernel log and its disks";
/// The memory of the machine: enough for thousands of loop devices.
pub const MEMORY_MIB: u32 = 2048;
/// The time to mount, unmount and power off, in addition to that of services and binaries.
const MARGIN: Duration = Duration::from_secs(120);

/// The specification of the machine and of its tests.
pub struct TestMachine<'a> {
    /// The name of the machine in messages.
    pub name: String,
    pub kernel: &'a Kernel,
    pub hypervisor: &'a Hypervisor,
    /// The program `guest-init`.
    pub init: &'a Path,
    /// Files for the initramfs, the test binaries among them.
    pub files: Vec<GuestFile>,
    pub memory_mib: u32,
    /// The disks, which the tests find by their names.
    pub disks: Vec<Disk>,
    /// The binaries with their mounts and services.
    pub tests: TestsSpec,
    /// The directory of the output of each binary and service, one file each.
    pub logs: PathBuf,
}

/// The results of the binaries and of the machine.
pub struct GuestResults {
    /// The result of each binary that ended, by its name.
    pub results: HashMap<String, TestBinaryResult>,
    /// How the machine ended.
    pub ending: ExitReason,
    /// The times at which the host received each line of each log.
    times: LineTimes,
}

impl TestMachine<'_> {
    /// Runs the machine until it ends.
    pub async fn run(self, step: &Step) -> Result<GuestResults> {
        let deadline = self.deadline();
        let mut vm = self.boot().await?;
        let mut results = HashMap::new();
        let listen = async {
            while let Some(message) = vm.next_message().await {
                match message {
                    Message::Started { kernel } => step.note(format!("Linux {kernel} is up")),
                    Message::TestBinary(result) => {
                        step.note(format!("{} has ended", result.name));
                        results.insert(result.name.clone(), result);
                    }
                    _ => {}
                }
            }
        };
        let ending = match tokio::time::timeout(deadline, listen).await {
            Ok(()) => vm.wait_ended(Duration::from_secs(10)).await?,
            Err(_) => ExitReason::Crashed(format!("it did not end within {deadline:?}")),
        };
        Ok(GuestResults { results, ending, times: vm.line_times() })
    }

    /// Starts the machine and waits until its PID 1 runs.
    pub async fn boot(self) -> Result<Vm> {
        let scratch = tempfile::tempdir().context("make a directory")?;
        let initramfs = scratch.path().join("initramfs");
        let modules = self.kernel.modules(&["boot", "tests"]).await?;
        vm::initramfs(&initramfs, self.init, &modules, &self.files, Mode::Tests(self.tests))?;
        let spec = VmSpec {
            name: self.name,
            hypervisor: self.hypervisor.clone(),
            kernel: self.kernel.clone(),
            initramfs,
            memory_mib: self.memory_mib,
            cpus: 2,
            disks: self.disks,
            network: false,
            forwards: Vec::new(),
            logs: self.logs,
        };
        Vm::boot(&spec, BOOT_TIMEOUT).await
    }

    fn deadline(&self) -> Duration {
        let ready: Duration = self.tests.services.iter().map(|service| service.ready_within).sum();
        let binaries: Duration = self.tests.binaries.iter().map(|binary| binary.timeout).sum();
        MARGIN + ready + binaries
    }
}

impl GuestResults {
    /// Returns the run time of a binary, and an error if it did not end as a passed one does.
    pub fn ended_well(&self, binary: &str) -> (Result<(), String>, Duration) {
        let Some(result) = self.results.get(binary) else {
            return (Err("it did not end, for the machine did".to_owned()), Duration::ZERO);
        };
        let well = match &result.end {
            End::Exited(0) => Ok(()),
            End::Exited(code) => Err(format!("it exited with {code}")),
            End::Signalled(signal) => Err(format!("it was killed by {signal}")),
            End::TimedOut => Err(format!("it was killed after {:?}", result.time)),
            End::NotStarted(why) => Err(why.clone()),
        };
        (well, result.time)
    }

    /// Returns the times at which the host received the lines of a binary's log.
    pub fn line_times(&self, binary: &str) -> &[Instant] {
        self.times.get(binary).map(Vec::as_slice).unwrap_or_default()
    }

    /// Adds the end of the machine to the report. A failure that the guest reported adds nothing to failed tests.
    pub fn verdict(&self, report: &mut Report, suite: &str) {
        let outcome = match &self.ending {
            ExitReason::Passed => Outcome::Passed,
            ExitReason::Failed(_) if report.failed() > 0 => return,
            ending => Outcome::Failed(ending.failure().unwrap_or_default().to_owned()),
        };
        report.push(suite, MACHINE, outcome, None);
    }
}

/// Returns a disk of this machine alone. If it has an XFS, that must be consistent at the end.
pub fn data_disk(name: &str, image: &Path) -> Disk {
    Disk { name: name.to_owned(), image: image.to_owned(), mode: DiskMode::Persistent }
}

/// Returns a mount of a disk's XFS at `target`.
pub fn xfs(disk: &str, target: &str, options: &str) -> Mount {
    Mount::of_disk(disk, target, "xfs", options)
}
