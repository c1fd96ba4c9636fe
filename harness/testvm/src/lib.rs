//! Virtual machines for tests: kernels, root file systems and disks are built from pinned definitions and cached,
//! and QEMU boots them without root.
//!
//! - [`session`]: the project under test, its directories, and the cancellation of a run.
//! - [`images`]: what a machine boots. [`packages`], [`go_build`] and [`rust_build`] provide the programs.
//! - [`release_build`]: static programs for other architectures, the same from every checkout. [`cargo_tool`] installs
//!   programs of crates.
//! - [`vm`]: a machine as data, and as a process with one owner. [`test_machine`] runs test binaries in one.
//! - [`report`], [`progress`] and [`steps`]: the results for users and CI, and the steps while they run.
//! - [`cache`] and [`process`]: artifacts that are built once, and child processes that end with their owner.
//! - [`versions`] and [`scratch`]: the exact versions that a run uses, and its temporary files.
//!
//! PID 1 of the machines is the program `guest-init` of the crate `testvm-guest`. The caller builds it, static.
//!
//! A project that uses the crate brings a directory of definitions ([`session::Workspace::definitions`]): `kernels/kernels.toml`
//! lists kernels and their modules, `node/node.toml` the packages of a root file system, and each directory with a `go.mod`
//! pins programs in Go ([`go_build`]). The names of caches, variables and reports come from [`session::Project`].
//!
//! `examples/test_on_xfs.rs` is a complete program: it runs a test as root on XFS with project quotas, and prints a table.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use testvm::images::kernel::Kernel;
//! use testvm::packages;
//! use testvm::session::{Project, Session, Workspace};
//! use testvm::test_machine::{MEMORY_MIB, TestMachine};
//! use testvm::vm::{self, GuestFile};
//! use testvm_guest::spec::{TestBinary, TestsSpec};
//!
//! /// Runs a test binary as root on the default kernel, and prints how it ended.
//! async fn run(init: &Path, binary: &Path) -> anyhow::Result<()> {
//!     // Kernels are listed in /src/disk-tool/images/kernels/kernels.toml, and cached in ~/.cache/disk-tool.
//!     let project = Project { name: "disk-tool", command: "cargo xtask" };
//!     let workspace = Workspace::new("/src/disk-tool".into(), "/src/disk-tool/images".into());
//!     let session = Session::new(project, workspace)?;
//!     packages::ensure(&session, packages::VIRTUAL_MACHINE).await?;
//!     let kernel = Kernel::prepare(&session, None).await?;
//!     let hypervisor = vm::choose(&session, &kernel, init).await?;
//!     let test = TestBinary {
//!         name: "quota".into(),
//!         path: "/tests/quota".into(),
//!         args: Vec::new(),
//!         timeout: std::time::Duration::from_secs(60),
//!         ..TestBinary::default()
//!     };
//!     let machine = TestMachine {
//!         name: "quota".into(),
//!         kernel: &kernel,
//!         hypervisor: &hypervisor,
//!         init,
//!         files: vec![GuestFile { path: "/tests/quota".into(), mode: 0o755, host: binary.into() }],
//!         memory_mib: MEMORY_MIB,
//!         disks: Vec::new(),
//!         tests: TestsSpec { binaries: vec![test], ..TestsSpec::default() },
//!         logs: session.workspace.reports("quota"),
//!     };
//!     let step = session.progress.step("test quotas");
//!     let results = machine.run(&step).await?;
//!     println!("{:?}", results.ended_well("quota"));
//!     Ok(())
//! }
//! ```

pub mod cache;
pub mod cargo_tool;
mod disk_space;
pub mod excerpt;
pub mod go_build;
pub mod images;
pub mod kernel_log;
pub mod packages;
pub mod process;
pub mod progress;
pub mod release_build;
pub mod report;
pub mod rust_build;
pub mod scratch;
pub mod session;
pub mod steps;
pub mod test_machine;
pub mod versions;
pub mod vm;
