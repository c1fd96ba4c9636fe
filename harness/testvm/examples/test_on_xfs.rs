//! Runs a test program as root in a virtual machine, on an empty XFS with project quotas, and prints a table of the results.
//!
//! The program must be static, as every program in the machine. It passes if it ends with exit code 0. The first run builds
//! the kernel's files and takes some minutes; later ones take seconds.
//!
//! ```console
//! $ cargo build --release --package testvm-guest --bin guest-init --target x86_64-unknown-linux-musl
//! $ cargo run --package testvm --example test_on_xfs -- \
//!     target/x86_64-unknown-linux-musl/release/guest-init path/to/static-test
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::images::disk;
use testvm::images::kernel::Kernel;
use testvm::packages;
use testvm::report::Report;
use testvm::session::{Project, Session, Workspace};
use testvm::test_machine::{self, MEMORY_MIB, TestMachine};
use testvm::vm::{self, GuestFile};
use testvm_guest::spec::{TestBinary, TestsSpec};

/// The names of the project under test: of its cache directory, and of its environment variables.
const PROJECT: Project = Project { name: "xfs-example", command: "cargo run --example test_on_xfs --" };
/// The name of the disk, and its size: mkfs.xfs makes none that is smaller than 300 MiB.
const DISK: &str = "data";
const DISK_MIB: u64 = 512;
/// The path of the test program in the machine.
const TEST: &str = "/tests/test";

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [init, test] = arguments.as_slice() else {
        anyhow::bail!("usage: test_on_xfs PATH_OF_GUEST_INIT PATH_OF_STATIC_TEST");
    };
    // The definitions list the kernels. Another project has a directory of its own, with a `kernels/kernels.toml`.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).context("find the workspace")?;
    let session = Session::new(PROJECT, Workspace::new(root.to_owned(), root.join("vm-images")))?;
    let report = run(&session, init, test).await?;
    session.progress.finish();
    println!("{}\n{}", report.table(), report.summary());
    Ok(if report.succeeded() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run(session: &Session, init: &Path, test: &Path) -> Result<Report> {
    packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
    let kernel = Kernel::prepare(session, None).await?;
    let hypervisor = vm::choose(session, &kernel, init).await?;

    let logs = session.workspace.reports(PROJECT.name);
    std::fs::create_dir_all(&logs).with_context(|| format!("create {}", logs.display()))?;
    let image = logs.join("data.xfs");
    disk::xfs(&image, DISK_MIB).await?;

    let binary = TestBinary {
        name: "test".to_owned(),
        path: TEST.to_owned(),
        args: Vec::new(),
        timeout: Duration::from_secs(120),
        ..TestBinary::default()
    };
    let machine = TestMachine {
        name: "test on XFS".to_owned(),
        kernel: &kernel,
        hypervisor: &hypervisor,
        init,
        files: vec![GuestFile { path: TEST.to_owned(), host: test.to_owned() }],
        memory_mib: MEMORY_MIB,
        disks: vec![test_machine::data_disk(DISK, &image)],
        tests: TestsSpec {
            mounts: vec![test_machine::xfs(DISK, "/data", "prjquota")],
            binaries: vec![binary],
            ..TestsSpec::default()
        },
        logs,
    };
    let step = session.progress.step("test on XFS");
    let results = machine.run(&step).await?;
    step.done("");

    let mut report = Report::new();
    let (ended, time) = results.ended_well("test");
    report.record("xfs", "the test program", time, &ended.map_err(anyhow::Error::msg));
    // The verdict of the machine itself: whether it mounted the disk, and ended in order.
    results.verdict(&mut report, "xfs");
    Ok(report)
}
