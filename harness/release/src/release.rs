//! `cargo harness release`: the files of a release, written from a commit.
//!
//! Nothing is published: a person pushes the tag, the image and the files. The version has one home, the manifest of the
//! workspace, and the notes have one, the changelog.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use testvm::cache;
use testvm::process::{Program, git};
use testvm::session::Session;

use crate::sources::{VERSION, changed_files, checkout};
use crate::{deb, image, notes};

const CHANGELOG: &str = "CHANGELOG.md";
/// What users apply, from the root of the checkout.
const MANIFESTS: &str = "csi/deploy";
/// The Helm chart. It has a link to the manifests.
const CHART: &str = "csi/chart";
/// The chart, whose link `deploy` leads to the manifests. `helm package` gives this name to the directory, too.
const CHART_CONTENT: [(&str, &str); 2] = [(CHART, "loopfs"), (MANIFESTS, "loopfs/deploy")];
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
    let text = fs::read_to_string(root.join(CHANGELOG)).with_context(|| format!("read {CHANGELOG}"))?;
    let changes = notes::section(&text, VERSION).with_context(|| {
        format!(
            "{CHANGELOG} has no section for version {VERSION}; rename \"## [Unreleased]\" to \"## [{VERSION}] - DATE\""
        )
    })?;
    let tag = format!("v{VERSION}");
    require_releasable(root, args.tag.then_some(&tag)).await?;

    let directory = session.workspace.target().join(format!("release-{VERSION}"));
    cache::empty_dir(&directory)?;
    let sources = checkout(session).await?;
    let [image, manifests, chart] =
        ["-image.tar", "-manifests.tar.gz", ".tgz"].map(|end| format!("loopfs-{VERSION}{end}"));
    let contents = image::build(session, &sources, &directory.join(&image)).await?;
    image::check_sizes(&contents)?;
    let version = format!("loopfs-{VERSION}");
    pack(root, &[(MANIFESTS, &version)], &directory.join(&manifests)).await?;
    pack(root, &CHART_CONTENT, &directory.join(&chart)).await?;
    let mut names = vec![image, manifests, chart, NOTES.to_owned()];
    names.extend(deb::build(session, &sources, &directory).await?);
    names.sort();
    fs::write(directory.join(NOTES), notes::notes(changes, &contents)).context("write the notes")?;
    let mut checksums = String::new();
    for name in &names {
        checksums += &format!("{}  {name}\n", cache::digest_file(&directory.join(name))?);
    }
    fs::write(directory.join(CHECKSUMS), checksums).context("write the checksums")?;

    if args.tag {
        let message = format!("loopfs {VERSION}");
        git(root).args(["tag", "--annotate", &tag, "--message", &message]).run().await?;
    }
    session.progress.finish();
    println!("{}", image::summary(&directory, &contents));
    for name in names.iter().map(String::as_str).chain([CHECKSUMS]) {
        println!("  {name}");
    }
    if args.tag {
        println!("created the tag {tag}; publish it with `git push origin {tag}`");
    }
    Ok(())
}

/// Checks that the files of the checkout are those of its commit, and that the tag does not exist.
async fn require_releasable(root: &Path, tag: Option<&String>) -> Result<()> {
    let changed = changed_files(root).await?;
    anyhow::ensure!(
        changed.is_empty(),
        "a release is built from a commit, and these files differ from it; commit or remove them:\n{}",
        changed.join("\n")
    );
    if let Some(tag) = tag {
        let tags = git(root).args(["tag", "--list", tag]).run().await?.stdout;
        anyhow::ensure!(
            tags.is_empty(),
            "the tag {tag} exists already; raise workspace.package.version in Cargo.toml, or remove it with `git tag --delete {tag}`"
        );
    }
    Ok(())
}

/// Packs the files of directories that Git tracks, each below a directory of the archive. A link to a directory is a directory there,
/// without content. The bytes depend only on the names and contents of the files.
async fn pack(root: &Path, content: &[(&str, &str)], target: &Path) -> Result<()> {
    let directories = content.iter().map(|(directory, _)| *directory);
    let files = git(root).args(["ls-files", "-z", "--"]).args(directories).run().await?.stdout;
    anyhow::ensure!(!files.is_empty(), "Git tracks no files of {content:?}");
    Program::new("tar")
        .args([
            "--create",
            "--null",
            "--no-recursion",
            "--files-from=-",
            "--dereference",
            "--hard-dereference",
        ])
        .args(["--sort=name", "--format=gnu", "--owner=0", "--group=0", "--numeric-owner"])
        .args(["--mode=u=rwX,go=rX", "--mtime=@0"])
        .args(["--use-compress-program=gzip --best --no-name", "--transform"])
        .arg(content.iter().map(|(from, to)| format!("s,^{from},{to},;")).collect::<String>())
        .arg("--file")
        .arg(target)
        .current_dir(root)
        .input(files)
        .run()
        .await
        .map(drop)
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
        fs::write(root.join(CHART).join("Chart.yaml"), "name: loopfs\n").unwrap();
        std::os::unix::fs::symlink("../deploy", root.join(CHART).join("deploy")).unwrap();
        let run = async |args: &[&str]| {
            let identity = ["-c", "user.name=a", "-c", "user.email=a@example"];
            git(root).env("GIT_CONFIG_GLOBAL", "/dev/null").args(identity).args(args).run().await.unwrap();
        };
        run(&["init", "--quiet"]).await;
        run(&["add", "."]).await;
        run(&["commit", "--quiet", "--message", "a"]).await;
        run(&["tag", "v1.2.3"]).await;
    }

    #[tokio::test]
    async fn changed_or_tagged_checkout_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (root, other, tag) = (directory.path(), "v1.2".to_owned(), "v1.2.3".to_owned());
        repository(root).await;
        require_releasable(root, None).await.unwrap();
        require_releasable(root, Some(&other)).await.unwrap();
        let error = require_releasable(root, Some(&tag)).await.unwrap_err().to_string();
        assert!(error.contains("git tag --delete v1.2.3"), "{error}");
        fs::write(root.join("new"), "").unwrap();
        let error = require_releasable(root, None).await.unwrap_err().to_string();
        assert!(error.contains("?? new"), "{error}");
    }

    /// Two archives of the same files have the same bytes, and the files of a linked directory that Git tracks.
    #[tokio::test]
    async fn archive_depends_only_on_files() {
        let directory = tempfile::tempdir().unwrap();
        let archives = ["one", "other"].map(|name| directory.path().join(name).with_extension("tgz"));
        for archive in &archives {
            let root = archive.with_extension("");
            repository(&root).await;
            fs::write(root.join(".git/info/exclude"), "*.swp\n").unwrap();
            fs::write(root.join(MANIFESTS).join("a.yaml.swp"), archive.to_str().unwrap()).unwrap();
            let old =
                std::time::UNIX_EPOCH + std::time::Duration::from_secs(archive.as_os_str().len() as u64);
            fs::File::open(root.join(CHART).join("Chart.yaml")).unwrap().set_modified(old).unwrap();
            pack(&root, &CHART_CONTENT, archive).await.unwrap();
        }
        let [one, other] = &archives;
        assert!(fs::read(one).unwrap() == fs::read(other).unwrap());
        let listed = Program::new("tar").args(["--list", "--file"]).arg(one).run().await.unwrap().stdout;
        assert_eq!(listed, "loopfs/Chart.yaml\nloopfs/deploy/\nloopfs/deploy/a.yaml\n");
    }
}
