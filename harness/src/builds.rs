//! The programs of the workspace that are built for guests, pods and nodes.

use std::path::PathBuf;

use anyhow::{Context, Result};
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

/// The two programs of the driver, the tool in its image, and the service and the client with which an administrator looks for a fault.
#[derive(Clone, Debug)]
pub(crate) struct DriverPrograms {
    pub(crate) csi: PathBuf,
    pub(crate) provisioner: PathBuf,
    pub(crate) tool: PathBuf,
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
    let mut args = vec!["build", profile.argument(), "--bins"];
    args.extend(["--package=csi", "--package=provisioner", "--package=node-debug"]);
    if profile == ProgramProfile::Test {
        // One build for all, so that a machine boots earlier.
        args.push("--package=loopfs-tool");
    }
    let built = programs(session, "build the driver", &args).await?;
    let tool = match profile {
        ProgramProfile::Test => built.program("loopfs")?,
        ProgramProfile::Release => released_tool(session).await?,
    };
    Ok(DriverPrograms {
        csi: built.program("loopfs-csi")?,
        provisioner: built.program("loopfs-provisioner")?,
        tool,
        node_debug: built.program("node-debug")?,
        dbg: built.program("dbg")?,
    })
}

/// Builds the tool loopfs as a release has it. With the features of dependencies that it enables, the driver would get code that it does
/// not use.
///
/// # Errors
/// The tool does not compile.
pub(crate) async fn released_tool(session: &Session) -> Result<PathBuf> {
    let args = ["build", ProgramProfile::Release.argument(), "--package=loopfs-tool"];
    programs(session, "build the tool loopfs", &args).await?.program("loopfs")
}

/// Builds the tests of loopfs, its tool and csi that run in virtual machines, with the tool and the examples of loopfs, which they run.
/// One build for all, so that what they share is compiled once.
///
/// # Errors
/// A test or an example does not compile.
pub(crate) async fn guest_tests(session: &Session) -> Result<Built> {
    let args = [
        "build",
        "--profile=guest-tests",
        "--package=loopfs",
        "--package=loopfs-tool",
        "--package=csi",
        "--test=kernel",
        "--test=power_cut",
        "--test=engine",
        "--features=loopfs/__tests,loopfs-tool/__tests,csi/__tests,csi/engine-tests",
    ];
    let examples = examples(session)?.into_iter().map(|name| format!("--example={name}"));
    let args: Vec<String> = args.map(str::to_owned).into_iter().chain(examples).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    programs(session, "build the tests for virtual machines", &args).await
}

/// Returns the names of the example programs of loopfs.
///
/// # Errors
/// Their directory cannot be read.
pub(crate) fn examples(session: &Session) -> Result<Vec<String>> {
    let directory = session.workspace.root().join("loopfs/examples");
    let entries = std::fs::read_dir(&directory).with_context(|| format!("read {}", directory.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.with_context(|| format!("read {}", directory.display()))?.file_name();
        names.extend(name.to_str().and_then(|name| name.strip_suffix(".rs")).map(str::to_owned));
    }
    Ok(names)
}
