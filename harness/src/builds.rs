//! The programs of the workspace that are built for guests, pods and nodes.

use std::path::PathBuf;

use anyhow::Result;
use testvm::rust_build::{Built, programs};
use testvm::session::Session;
use testvm_cluster::ClusterProfile;

/// Programs that run inside guests and pods.
#[derive(Clone, Debug)]
pub(crate) struct GuestPrograms {
    pub(crate) init: PathBuf,
    pub(crate) pause: PathBuf,
    pub(crate) volume_check: PathBuf,
}

/// The two programs of the driver, and the service and the client with which an administrator looks for a fault.
#[derive(Clone, Debug)]
pub(crate) struct DriverPrograms {
    pub(crate) csi: PathBuf,
    pub(crate) provisioner: PathBuf,
    pub(crate) node_debug: PathBuf,
    pub(crate) dbg: PathBuf,
}

/// The profile of cargo with which the programs of a release are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramProfile {
    /// For tests of behaviour, without link-time optimisation.
    Test,
    /// As users install them: for measurements, and for the conformance tests.
    Release,
}

impl ProgramProfile {
    /// Returns the argument of `cargo build`.
    fn argument(self) -> &'static str {
        match self {
            ProgramProfile::Test => "--profile=programs",
            ProgramProfile::Release => "--profile=release",
        }
    }
}

impl From<ClusterProfile> for ProgramProfile {
    fn from(cluster: ClusterProfile) -> ProgramProfile {
        match cluster {
            ClusterProfile::Default => ProgramProfile::Test,
            ClusterProfile::Benchmark | ClusterProfile::Conformance => ProgramProfile::Release,
        }
    }
}

/// Builds the programs of the guest side.
///
/// # Errors
/// The programs do not compile.
pub(crate) async fn guest_programs(session: &Session) -> Result<GuestPrograms> {
    let args =
        ["build", "--profile=guest-tests", "--package=testvm-guest", "--package=volume-check", "--bins"];
    let built = programs(session, "build the guest's programs", &args).await?;
    Ok(GuestPrograms {
        init: built.program("guest-init")?,
        pause: built.program("pause")?,
        volume_check: built.program("volume-check")?,
    })
}

/// Builds the driver.
///
/// # Errors
/// The driver does not compile.
pub(crate) async fn driver_programs(session: &Session, profile: ProgramProfile) -> Result<DriverPrograms> {
    // One build for all, so that what they share is compiled once.
    let packages = ["--package=csi", "--package=provisioner", "--package=node-debug"];
    let args = [["build", profile.argument(), "--bins"], packages].concat();
    let built = programs(session, "build the driver", &args).await?;
    Ok(DriverPrograms {
        csi: built.program("loopfs-csi")?,
        provisioner: built.program("loopfs-provisioner")?,
        node_debug: built.program("node-debug")?,
        dbg: built.program("dbg")?,
    })
}

/// Builds the command line tool of loopfs.
///
/// # Errors
/// The tool does not compile.
pub(crate) async fn loopfs_tool(session: &Session, profile: ProgramProfile) -> Result<PathBuf> {
    let args = ["build", profile.argument(), "--package", "loopfs-tool"];
    programs(session, "build the tool loopfs", &args).await?.program("loopfs")
}

/// Builds the tests of loopfs, its tool and csi that run in virtual machines, with the tool, which they run. One build for all, so that
/// what they share is compiled once.
///
/// # Errors
/// The tests do not compile.
pub(crate) async fn guest_tests(session: &Session) -> Result<Built> {
    let args = [
        "test",
        "--profile=guest-tests",
        "--no-run",
        "--package=loopfs",
        "--package=loopfs-tool",
        "--package=csi",
        "--test=kernel",
        "--test=power_cut",
        "--test=engine",
        "--features=loopfs/__tests,loopfs-tool/__tests,csi/__tests,csi/engine-tests",
    ];
    programs(session, "build the tests for virtual machines", &args).await
}

/// Builds the example programs of loopfs as its kernel tests are built, so that both share the library.
///
/// # Errors
/// An example does not compile.
pub(crate) async fn loopfs_examples(session: &Session) -> Result<Built> {
    let profile = "--profile=guest-tests";
    let args = ["build", profile, "--package", "loopfs", "--features", "__tests", "--examples"];
    programs(session, "build the examples of loopfs", &args).await
}
