//! `cargo harness image`: the driver's image for a registry, for each platform, the same from every checkout.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::images::oci::Entry;
use testvm::images::oci::index::{Contents, Index, Platform};
use testvm::session::Session;

use crate::programs::{Compilers, DRIVER, TARGETS, programs};
use crate::sources::{Sources, VERSION, checkout};

/// The largest image of one platform, in bytes. A node downloads as many when it starts the driver for the first time.
pub(crate) const MAX_SIZE: u64 = 15_000_000;

/// Writes the driver's image for linux/amd64 and linux/arm64, as an OCI archive for a registry.
#[derive(Debug, clap::Args)]
pub struct ImageArgs {
    /// The archive to write, instead of target/image/loopfs-VERSION.tar.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Builds the image of this checkout, and prints its digests.
///
/// # Errors
/// The programs do not compile for a platform, or the archive cannot be written.
pub async fn image(session: &Session, args: ImageArgs) -> Result<()> {
    let directory = session.workspace.target().join("image");
    let out = args.out.unwrap_or_else(|| directory.join(format!("loopfs-{VERSION}.tar")));
    if let Some(parent) = out.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    let sources = checkout(session).await?;
    let contents = build(session, &sources, &out).await?;
    session.progress.finish();
    println!("{}", summary(&out, &contents));
    check_sizes(&contents)
}

/// Builds the programs of `sources` for each platform, and writes the image to `out`.
///
/// # Errors
/// The programs do not compile for a platform, or the archive cannot be written.
pub(crate) async fn build(session: &Session, sources: &Sources, out: &Path) -> Result<Contents> {
    let compilers = Compilers::prepare(session).await?;
    let mut platforms = Vec::new();
    let mut entrypoint = Vec::new();
    for target in &TARGETS {
        let files = programs(session, &compilers, sources, target).await?;
        entrypoint = files.first().map(|(path, _)| (*path).to_owned()).into_iter().collect();
        let entries = files.into_iter().map(|(path, host)| Entry::Program { path: path.to_owned(), host });
        platforms.push(Platform { architecture: target.architecture.to_owned(), entries: entries.collect() });
    }
    let index = Index {
        reference: format!("{}:{VERSION}", repository()),
        labels: labels(sources.revision.as_deref(), &compilers.toolchain.version),
        tag: VERSION.to_owned(),
        entrypoint,
        platforms,
    };
    index.write(out)
}

/// Returns the labels of the image, most of them with the names of the image specification.
fn labels(revision: Option<&str>, rustc: &str) -> BTreeMap<String, String> {
    let standard = |name: &str| format!("org.opencontainers.image.{name}");
    let mut labels = BTreeMap::from([
        (standard("title"), "loopfs".to_owned()),
        (standard("description"), "Node-local volumes for Kubernetes on XFS project quotas".to_owned()),
        (standard("licenses"), "Apache-2.0".to_owned()),
        (standard("version"), VERSION.to_owned()),
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

/// Checks that no platform is larger than [`MAX_SIZE`].
///
/// # Errors
/// A platform is larger.
pub(crate) fn check_sizes(contents: &Contents) -> Result<()> {
    for platform in &contents.platforms {
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
pub(crate) fn summary(archive: &Path, contents: &Contents) -> String {
    let mut lines = vec![archive.display().to_string(), format!("{:<13} {}", "index", contents.digest)];
    for platform in &contents.platforms {
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
