//! `cargo harness release`: the files of a release, written from a commit.
//!
//! Nothing is published: a person pushes the tag, the image and the files. The version has one home, the manifest of the
//! workspace, and the notes have one, the changelog.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::cache;
use testvm::process::git;
use testvm::session::Session;

use crate::sources::{changed_files, checkout, version};
use crate::{archive, deb, image, notes};

const CHANGELOG: &str = "CHANGELOG.md";
/// What users apply, from the root of the checkout.
const MANIFESTS: &str = "csi/deploy";
/// The Helm chart. It has a link to the manifests.
const CHART: &str = "csi/chart";
const CHECKSUMS: &str = "SHA256SUMS";
const NOTES: &str = "RELEASE-NOTES.md";

/// Writes the files of a release into target/release-VERSION. VERSION is that of the workspace. The checkout must have no
/// changes, and the changelog a section for the version.
#[derive(Debug, clap::Args)]
pub struct ReleaseArgs {
    /// Also create the annotated Git tag vVERSION. It is not pushed.
    #[arg(long)]
    tag: bool,
}

/// Writes the files of a release.
///
/// # Errors
/// The checkout has changes, the changelog has no section for the version, the tag exists, or a file cannot be built.
pub async fn release(session: &Session, args: ReleaseArgs) -> Result<()> {
    let root = session.workspace.root();
    let version = version(root)?;
    let text = read(&root.join(CHANGELOG))?;
    let changes = notes::section(&text, &version).with_context(|| {
        format!(
            "{CHANGELOG} has no section for version {version}; rename \"## [Unreleased]\" to \"## [{version}] - DATE\""
        )
    })?;
    require_clean(root).await?;
    let tag = format!("v{version}");
    if args.tag {
        require_no_tag(root, &tag).await?;
    }

    let directory = session.workspace.target().join(format!("release-{version}"));
    cache::empty_dir(&directory)?;
    let image_name = format!("loopfs-{version}-image.tar");
    let sources = checkout(session).await?;
    let digests = image::build(session, &sources, &directory.join(&image_name)).await?;
    image::check_sizes(&digests)?;
    let manifests = format!("loopfs-{version}-manifests.tar.gz");
    pack(root, MANIFESTS, &format!("loopfs-{version}"), &directory.join(&manifests)).await?;
    let mut names = vec![image_name, manifests, pack_chart(root, &version, &directory).await?];
    names.extend(deb::build(session, &sources, &directory).await?);
    let repository = image::repository();
    write(&directory.join(NOTES), &notes::notes(&version, changes, repository, &digests))?;
    names.push(NOTES.to_owned());
    names.sort();
    write(&directory.join(CHECKSUMS), &checksums(&directory, &names)?)?;

    if args.tag {
        let message = format!("loopfs {version}");
        git(root).args(["tag", "--annotate", &tag, "--message", &message]).run().await?;
    }
    session.progress.finish();
    println!("{}", image::summary(&directory, &digests));
    for name in names.iter().map(String::as_str).chain([CHECKSUMS]) {
        println!("  {name}");
    }
    if args.tag {
        println!("created the tag {tag}; publish it with `git push origin {tag}`");
    }
    Ok(())
}

/// Checks that the files of the checkout are those of its commit.
async fn require_clean(root: &Path) -> Result<()> {
    let changed = changed_files(root).await?;
    anyhow::ensure!(
        changed.is_empty(),
        "a release is built from a commit, and these files differ from it; commit or remove them:\n{}",
        changed.join("\n")
    );
    Ok(())
}

async fn require_no_tag(root: &Path, tag: &str) -> Result<()> {
    let name = format!("refs/tags/{tag}");
    let found = git(root).args(["rev-parse", "--verify", "--quiet", &name]).finish().await?;
    anyhow::ensure!(
        !found.status.success(),
        "the tag {tag} exists already; raise workspace.package.version in Cargo.toml, or remove it with `git tag --delete {tag}`"
    );
    Ok(())
}

/// Packs the files of `directory` that Git tracks, below a directory `prefix` of the archive. In place of a link to a directory of
/// the checkout, the archive has the files of that directory.
async fn pack(root: &Path, directory: &str, prefix: &str, target: &Path) -> Result<()> {
    let mut files = Vec::new();
    let mut open = vec![(PathBuf::from(directory), PathBuf::from(prefix))];
    while let Some((directory, prefix)) = open.pop() {
        for name in tracked(root, &directory).await? {
            let below = prefix.join(name.strip_prefix(&directory)?);
            let path = root.join(&name);
            if path.is_dir() {
                let linked = fs::canonicalize(&path).with_context(|| format!("follow {}", path.display()))?;
                let linked = linked.strip_prefix(fs::canonicalize(root)?);
                let linked = linked.with_context(|| format!("{} leaves the checkout", name.display()))?;
                open.push((linked.to_owned(), below));
            } else {
                files.push((below, path));
            }
        }
    }
    archive::write(target, files)
}

/// Returns the files and links of a directory that Git tracks, as paths below `root`.
async fn tracked(root: &Path, directory: &Path) -> Result<Vec<PathBuf>> {
    let listed = git(root).args(["ls-files", "-z", "--"]).arg(directory).run().await?.stdout;
    let names: Vec<PathBuf> = listed.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect();
    anyhow::ensure!(!names.is_empty(), "Git tracks no files in {}", directory.display());
    Ok(names)
}

/// Packs the chart under the name that `helm package` gives it, and returns the name.
async fn pack_chart(root: &Path, version: &str, directory: &Path) -> Result<String> {
    let path = root.join(CHART).join("Chart.yaml");
    let chart: serde_norway::Value =
        serde_norway::from_str(&read(&path)?).with_context(|| format!("parse {}", path.display()))?;
    let name = chart.get("name").and_then(|name| name.as_str());
    let name = name.with_context(|| format!("{} has no name", path.display()))?;
    for key in ["version", "appVersion"] {
        let found = chart.get(key).and_then(|value| value.as_str());
        anyhow::ensure!(
            found == Some(version),
            "{} has the {key} {found:?}, and the workspace has {version}; change the file",
            path.display()
        );
    }
    let archive = format!("{name}-{version}.tgz");
    pack(root, CHART, name, &directory.join(&archive)).await?;
    Ok(archive)
}

/// Returns the lines of a file for `sha256sum --check`.
fn checksums(directory: &Path, names: &[String]) -> Result<String> {
    let line = |name: &String| -> Result<String> {
        Ok(format!("{}  {name}\n", cache::digest_file(&directory.join(name))?))
    };
    names.iter().map(line).collect()
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a repository with one commit that has a manifest, and a chart with a link to it.
    async fn repository(root: &Path) {
        for directory in [MANIFESTS, CHART] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::write(root.join(MANIFESTS).join("a.yaml"), "kind: A\n").unwrap();
        fs::write(root.join(CHART).join("Chart.yaml"), "name: loopfs\nversion: 1.2.3\nappVersion: 1.2.3\n")
            .unwrap();
        std::os::unix::fs::symlink("../deploy", root.join(CHART).join("deploy")).unwrap();
        let run = async |args: &[&str]| {
            let identity = ["-c", "user.name=a", "-c", "user.email=a@example"];
            git(root).env("GIT_CONFIG_GLOBAL", "/dev/null").args(identity).args(args).run().await.unwrap();
        };
        run(&["init", "--quiet"]).await;
        run(&["add", "."]).await;
        run(&["commit", "--quiet", "--message", "a"]).await;
    }

    /// The error lists the changed files.
    #[tokio::test]
    async fn changed_checkout_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        repository(directory.path()).await;
        require_clean(directory.path()).await.unwrap();
        fs::write(directory.path().join("new"), "").unwrap();
        let error = require_clean(directory.path()).await.unwrap_err().to_string();
        assert!(error.contains("?? new"), "{error}");
    }

    #[tokio::test]
    async fn an_existing_tag_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        repository(directory.path()).await;
        require_no_tag(directory.path(), "v1.2.3").await.unwrap();
        git(directory.path()).args(["tag", "v1.2.3"]).run().await.unwrap();
        let error = require_no_tag(directory.path(), "v1.2.3").await.unwrap_err().to_string();
        assert!(error.contains("git tag --delete v1.2.3"), "{error}");
    }

    /// A chart with the version of the workspace is packed with the manifests.
    #[tokio::test]
    async fn chart_with_another_version_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (root, target) = (directory.path().join("checkout"), directory.path().join("release"));
        fs::create_dir_all(&target).unwrap();
        repository(&root).await;
        let name = pack_chart(&root, "1.2.3", &target).await.unwrap();
        assert_eq!(name, "loopfs-1.2.3.tgz");
        let file = fs::File::open(target.join(name)).unwrap();
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
        let entries = archive.entries().unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect();
        names.sort();
        assert_eq!(names, ["loopfs/Chart.yaml", "loopfs/deploy/a.yaml"]);
        let error = pack_chart(&root, "1.2.4", &target).await.unwrap_err().to_string();
        assert!(error.contains("1.2.3") && error.contains("1.2.4"), "{error}");
    }
}
