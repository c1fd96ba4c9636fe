//! The test machines of one kernel.

use std::path::{Path, PathBuf};

use anyhow::Result;
use testvm::cache;
use testvm::images::kernel::Kernel;
use testvm::session::Session;
use testvm::test_machine::{MEMORY_MIB, TestMachine};
use testvm::vm::{self, Disk, GuestFile, Hypervisor};
use testvm_guest::spec::TestsSpec;

/// One kernel, and what all its machines share.
pub(super) struct Machines {
    pub(super) kernel: Kernel,
    hypervisor: Hypervisor,
    init: PathBuf,
    /// The directory of the logs.
    pub(super) logs: PathBuf,
}

impl Machines {
    /// Fetches a kernel, or the default one. `name` is that of the directory of the logs, and `init` the PID 1 of the machines.
    pub(super) async fn prepare(
        session: &Session,
        kernel: Option<&str>,
        init: &Path,
        name: &str,
    ) -> Result<Machines> {
        let kernel = Kernel::prepare(session, kernel).await?;
        let hypervisor = vm::choose(session, &kernel, init).await?;
        let logs = session.workspace.reports("test").join(name);
        // The logs of an earlier run must not be read as those of this run.
        cache::remove_dir(&logs)?;
        Ok(Machines { kernel, hypervisor, init: init.to_owned(), logs })
    }

    /// Returns the kernel and the accelerator, for messages.
    pub(super) fn title(&self) -> String {
        format!("Linux {} ({})", self.kernel.release(), self.hypervisor.accelerator)
    }

    pub(super) fn machine(
        &self,
        name: &str,
        files: Vec<GuestFile>,
        disks: Vec<Disk>,
        tests: TestsSpec,
    ) -> TestMachine<'_> {
        TestMachine {
            name: name.to_owned(),
            kernel: &self.kernel,
            hypervisor: &self.hypervisor,
            init: &self.init,
            files,
            memory_mib: MEMORY_MIB,
            disks,
            tests,
            logs: self.logs.clone(),
        }
    }
}

/// Returns a program at `path` in a machine.
pub(super) fn program(path: &str, host: PathBuf) -> GuestFile {
    GuestFile { path: path.to_owned(), host }
}
