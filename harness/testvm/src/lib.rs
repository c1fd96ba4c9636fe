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
