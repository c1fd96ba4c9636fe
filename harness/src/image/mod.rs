//! `cargo harness image`: the driver's image for a registry, for each platform, the same from every checkout.
//!
//! The clusters of the harness use another archive of the same programs (`nodes::driver_image`): for this machine only, and
//! built with cargo's ordinary directories, so that a change is compiled in seconds.

pub(crate) mod program;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::cargo_tool::CargoTool;
use testvm::images::oci::Entry;
use testvm::images::oci::index::{Digests, Index, Platform};
use testvm::images::rust_toolchain;
use testvm::packages;
use testvm::release_build::ReleaseBuild;
use testvm::rust_build::Toolchain;
use testvm::session::Session;

use crate::earlier::git;
use crate::nodes::{DRIVER, driver_files};

/// Adds the list of dependencies to each program. Scanners of images read it.
const CARGO_AUDITABLE: CargoTool = CargoTool { name: "cargo-auditable", version: "0.7.7" };

/// The largest image of one platform, in bytes. A node downloads as many when it starts the driver for the first time.
pub(crate) const MAX_SIZE: u64 = 15_000_000;

/// Writes the driver's image for linux/amd64 and linux/arm64, as an OCI archive for a registry.
#[derive(Debug, clap::Args)]
pub struct ImageArgs {
    /// The archive to write, instead of target/image/loopfs-VERSION.tar.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

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

/// The sources of an image.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// The directory of the workspace.
    pub(crate) root: PathBuf,
    /// The directory of what is built, which no build of other sources uses.
    pub(crate) target_dir: PathBuf,
    /// The commit, if the sources are those of a commit.
    pub(crate) revision: Option<String>,
}

/// Builds the image of this checkout, and prints its digests.
///
/// # Errors
/// The programs do not compile for a platform, or the archive cannot be written.
pub async fn image(session: &Session, args: ImageArgs) -> Result<()> {
    let root = session.workspace.root();
    let version = version(root)?;
    let directory = session.workspace.target().join("image");
    let out = args.out.unwrap_or_else(|| directory.join(format!("loopfs-{version}.tar")));
    if let Some(parent) = out.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    let sources = checkout(session).await?;
    let digests = build(session, &sources, &out).await?;
    session.progress.finish();
    println!("{}", summary(&out, &digests));
    check_sizes(&digests)
}

/// Returns the sources of this checkout. They have a revision if they do not differ from the commit.
///
/// # Errors
/// The repository has no commit.
pub(crate) async fn checkout(session: &Session) -> Result<Sources> {
    let root = session.workspace.root().to_owned();
    let revision = match changed_files(&root).await {
        Ok(changed) if changed.is_empty() => Some(head(&root).await?),
        // Sources without a repository can be built, too.
        _ => None,
    };
    Ok(Sources { root, target_dir: session.workspace.target().join("image/build"), revision })
}

/// Returns the commit of a checkout.
///
/// # Errors
/// The directory is not in a Git repository, or the repository has no commit.
pub(crate) async fn head(root: &Path) -> Result<String> {
    Ok(git(root).args(["rev-parse", "HEAD"]).run().await?.stdout.trim().to_owned())
}

/// Returns the files that differ from the commit, as `git status` prints them.
///
/// # Errors
/// The directory is not in a Git repository.
pub(crate) async fn changed_files(root: &Path) -> Result<Vec<String>> {
    let status = git(root).args(["status", "--porcelain"]).run().await?.stdout;
    Ok(status.lines().map(str::to_owned).collect())
}

/// Builds the programs of `sources` for each platform, and writes the image to `out`.
///
/// # Errors
/// The programs do not compile for a platform, or the archive cannot be written.
pub(crate) async fn build(session: &Session, sources: &Sources, out: &Path) -> Result<Digests> {
    let compilers = Compilers::prepare(session).await?;
    let version = version(&sources.root)?;
    let mut platforms = Vec::new();
    let mut entrypoint = Vec::new();
    for target in &TARGETS {
        let files = programs(session, &compilers, sources, target).await?;
        entrypoint = files.first().map(|(path, _)| (*path).to_owned()).into_iter().collect();
        let entries = files.into_iter().map(|(path, host)| Entry::Program { path: path.to_owned(), host });
        platforms.push(Platform { architecture: target.architecture.to_owned(), entries: entries.collect() });
    }
    let index = Index {
        reference: format!("{}:{version}", repository()),
        labels: labels(&version, sources.revision.as_deref(), compilers.toolchain.version()),
        tag: version,
        entrypoint,
        platforms,
    };
    index.write(out)
}

/// What compiles the programs of all platforms.
#[derive(Debug)]
pub(crate) struct Compilers {
    /// One compiler for all platforms, and the same on each machine with the same packages.
    toolchain: Toolchain,
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
    // A build of its own: with the features of the tool, the driver would get code that it does not use.
    let title = format!("build the tool loopfs for linux/{}", target.architecture);
    let tool = ["--package", "loopfs", "--features", "loopfs/cli", "--bin", "loopfs"];
    let tool = build.programs(session, &title, &tool).await?;
    let program = |name: &str| driver.program(name);
    Ok(driver_files(program("loopfs-csi")?, program("loopfs-provisioner")?, tool.program("loopfs")?))
}

/// Returns the labels of the image, most of them with the names of the image specification.
fn labels(version: &str, revision: Option<&str>, rustc: &str) -> BTreeMap<String, String> {
    let standard = |name: &str| format!("org.opencontainers.image.{name}");
    let mut labels = BTreeMap::from([
        (standard("title"), "loopfs".to_owned()),
        (standard("description"), "Node-local volumes for Kubernetes on XFS project quotas".to_owned()),
        (standard("licenses"), "Apache-2.0".to_owned()),
        (standard("version"), version.to_owned()),
        // The same sources give the same digest only with this compiler.
        ("dev.loopfs.rustc".to_owned(), rustc.to_owned()),
    ]);
    labels.extend(revision.map(|revision| (standard("revision"), revision.to_owned())));
    labels
}

/// Returns the name of the image in the manifests, without its tag.
pub(crate) fn repository() -> &'static str {
    DRIVER.rsplit_once(':').map_or(DRIVER, |(repository, _)| repository)
}

/// Returns the version of the workspace at `root`. The manifest of the workspace is its only source.
///
/// # Errors
/// The manifest cannot be read, or has no version.
pub(crate) fn version(root: &Path) -> Result<String> {
    let path = root.join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let manifest: toml::Table = text.parse().with_context(|| format!("parse {}", path.display()))?;
    let version = manifest.get("workspace").and_then(|workspace| workspace.get("package"));
    let version = version.and_then(|package| package.get("version")).and_then(|version| version.as_str());
    version.map(str::to_owned).with_context(|| format!("{} has no workspace.package.version", path.display()))
}

/// Checks that no platform is larger than [`MAX_SIZE`].
///
/// # Errors
/// A platform is larger.
pub(crate) fn check_sizes(digests: &Digests) -> Result<()> {
    for platform in &digests.platforms {
        anyhow::ensure!(
            platform.size <= MAX_SIZE,
            "the image for linux/{} has {} bytes, and at most {MAX_SIZE} are allowed; `cargo tree --edges normal` shows new \
             dependencies",
            platform.architecture,
            platform.size
        );
    }
    Ok(())
}

/// Returns a table of the digests and sizes.
pub(crate) fn summary(archive: &Path, digests: &Digests) -> String {
    let mut lines = vec![archive.display().to_string(), format!("{:<13} {}", "index", digests.index)];
    for platform in &digests.platforms {
        let name = format!("linux/{}", platform.architecture);
        lines.push(format!("{name:<13} {} {}", platform.digest, megabytes(platform.size)));
    }
    lines.join("\n")
}

/// Returns a number of bytes in MB, rounded up to a tenth.
fn megabytes(bytes: u64) -> String {
    let tenths = bytes.div_ceil(100_000);
    format!("{}.{} MB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use testvm::images::oci::index::PlatformDigest;

    use super::*;

    fn digests(size: u64) -> Digests {
        let platform = PlatformDigest { architecture: "arm64".into(), digest: "sha256:b".into(), size };
        Digests { index: "sha256:a".into(), platforms: vec![platform] }
    }

    #[test]
    fn an_image_that_is_too_large_is_refused_with_its_platform() {
        check_sizes(&digests(MAX_SIZE)).unwrap();
        let error = check_sizes(&digests(MAX_SIZE + 1)).unwrap_err().to_string();
        assert!(error.contains("linux/arm64") && error.contains("15000001"), "{error}");
    }

    #[test]
    fn the_summary_has_each_digest_and_the_size_of_each_platform() {
        let text = summary(Path::new("/image.tar"), &digests(7_123_456));
        assert_eq!(text, "/image.tar\nindex         sha256:a\nlinux/arm64   sha256:b 7.2 MB");
    }

    #[test]
    fn the_revision_is_a_label_only_if_it_is_known() {
        let key = "org.opencontainers.image.revision";
        assert_eq!(labels("1.0.0", Some("abc"), "rustc 1").get(key).map(String::as_str), Some("abc"));
        assert_eq!(labels("1.0.0", None, "rustc 1").get(key), None);
    }

    #[test]
    fn the_version_is_that_of_the_workspace() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert_eq!(version(root).unwrap(), env!("CARGO_PKG_VERSION"));
        assert_eq!(repository(), "docker.io/library/loopfs");
    }
}
