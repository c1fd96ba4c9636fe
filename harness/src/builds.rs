//! The programs of the workspace that are built for guests, pods and nodes.

use std::path::PathBuf;

use anyhow::Result;
use testvm::rust_build::programs;
use testvm::session::Session;

/// Programs that run inside guests and pods.
#[derive(Clone, Debug)]
pub(crate) struct GuestPrograms {
    pub(crate) init: PathBuf,
    pub(crate) pause: PathBuf,
    pub(crate) volume_check: PathBuf,
}

/// The driver's two programs.
#[derive(Clone, Debug)]
pub(crate) struct DriverPrograms {
    pub(crate) csi: PathBuf,
    pub(crate) provisioner: PathBuf,
}

/// Builds the programs of the guest side.
///
/// # Errors
/// The programs do not compile.
pub(crate) async fn guest_programs(session: &Session) -> Result<GuestPrograms> {
    let args = ["build", "--release", "--package", "testvm-guest", "--package", "volume-check", "--bins"];
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
pub(crate) async fn driver_programs(session: &Session) -> Result<DriverPrograms> {
    let args = ["build", "--release", "--package", "csi", "--package", "provisioner", "--bins"];
    let built = programs(session, "build the driver", &args).await?;
    Ok(DriverPrograms {
        csi: built.program("loopfs-csi")?,
        provisioner: built.program("loopfs-provisioner")?,
    })
}

/// Builds the command line tool of loopfs.
///
/// # Errors
/// The tool does not compile.
pub(crate) async fn loopfs_tool(session: &Session) -> Result<PathBuf> {
    let args = ["build", "--release", "--package", "loopfs", "--features", "loopfs/cli", "--bin", "loopfs"];
    let built = programs(session, "build the tool loopfs", &args).await?;
    built.program("loopfs")
}
