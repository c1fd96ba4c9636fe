//! The programs of the driver, for each platform of a release.

use std::path::PathBuf;

use anyhow::Result;
use testvm::cargo_tool::CargoTool;
use testvm::images::rust_toolchain;
use testvm::packages;
use testvm::release_build::ReleaseBuild;
use testvm::rust_build::Toolchain;
use testvm::session::Session;

use crate::sources::Sources;

/// The image of the driver, as in the manifests.
pub const DRIVER: &str = "docker.io/library/loopfs:dev";

/// Adds the list of dependencies to each program. Scanners of images read it.
const CARGO_AUDITABLE: CargoTool = CargoTool { name: "cargo-auditable", version: "0.7.7" };

/// A platform of the image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// The architecture by Go's name.
    pub(crate) architecture: &'static str,
    /// The architecture by Rust's name.
    pub(crate) machine: &'static str,
    /// The target by rustc's name. glibc is linked into the programs, because distributions have a static one for each
    /// architecture, but no standard library of Rust for musl.
    pub(crate) triple: &'static str,
    /// The C compiler on machines of another architecture.
    c_compiler: &'static str,
}

pub(crate) const TARGETS: [Target; 2] = [
    Target {
        architecture: "amd64",
        machine: "x86_64",
        triple: "x86_64-unknown-linux-gnu",
        c_compiler: "x86_64-linux-gnu-gcc",
    },
    Target {
        architecture: "arm64",
        machine: "aarch64",
        triple: "aarch64-unknown-linux-gnu",
        c_compiler: "aarch64-linux-gnu-gcc",
    },
];

impl Target {
    /// Returns `true` if this machine runs programs of the target.
    pub(crate) fn is_native(&self) -> bool {
        self.machine == std::env::consts::ARCH
    }
}

/// What compiles the programs of all platforms.
#[derive(Debug)]
pub(crate) struct Compilers {
    /// One compiler for all platforms, and the same on each machine with the same packages.
    pub(crate) toolchain: Toolchain,
    /// The program `cargo-auditable`.
    auditable: PathBuf,
}

impl Compilers {
    /// Returns the compilers, from the cache or installed.
    ///
    /// # Errors
    /// A package or a tool cannot be installed.
    pub(crate) async fn prepare(session: &Session) -> Result<Compilers> {
        if TARGETS.iter().any(|target| target.machine == "aarch64" && !target.is_native()) {
            packages::ensure(session, packages::AARCH64).await?;
        }
        let toolchain = rust_toolchain::prepare(session, &TARGETS.map(|target| target.triple)).await?;
        Ok(Compilers { toolchain, auditable: CARGO_AUDITABLE.prepare(session).await? })
    }
}

/// Builds the programs of the driver for one platform. Returns the path of each in the image and on this machine.
///
/// # Errors
/// The programs do not compile.
pub(crate) async fn programs(
    session: &Session,
    compilers: &Compilers,
    sources: &Sources,
    target: &Target,
) -> Result<Vec<(&'static str, PathBuf)>> {
    let build = ReleaseBuild {
        toolchain: &compilers.toolchain,
        auditable: &compilers.auditable,
        root: &sources.root,
        target_dir: &sources.target_dir,
        triple: target.triple,
        c_compiler: (!target.is_native()).then_some(target.c_compiler),
    };
    let title = format!("build the driver for linux/{}", target.architecture);
    let driver = ["--bins", "--package", "csi", "--package", "provisioner"];
    let driver = build.programs(session, &title, &driver).await?;
    // A build of its own: with the features of dependencies that the tool enables, the driver would get code that it does not use.
    let title = format!("build the tool loopfs for linux/{}", target.architecture);
    let tool = build.programs(session, &title, &["--package", "loopfs-tool"]).await?;
    let [csi, provisioner] = ["loopfs-csi", "loopfs-provisioner"].map(|name| driver.program(name));
    Ok(driver_files(csi?, provisioner?, tool.program("loopfs")?))
}

/// Returns the path of each program in the image of the driver, and its path on the host. The image runs the first.
#[must_use]
pub fn driver_files(csi: PathBuf, provisioner: PathBuf, tool: PathBuf) -> Vec<(&'static str, PathBuf)> {
    // With the tool, `loopfs doctor` can run where the driver runs.
    vec![("/loopfs-csi", csi), ("/loopfs-provisioner", provisioner), ("/loopfs", tool)]
}
