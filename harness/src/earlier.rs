//! The earlier version of the driver that upgrades begin with: a pinned commit of this repository, built from its sources.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;
use testvm::cache::{self, Recipe};
use testvm::process::{Program, git};
use testvm::rust_build::programs_of;
use testvm::session::Session;

/// The file with the pin, from the root of the checkout.
const PIN: &str = "harness/upgrade.toml";
/// What users apply, from the root of a checkout.
const MANIFESTS: &str = "csi/deploy";

/// A build of the pinned commit, whose result the cache keeps with the manifests.
struct Build {
    /// The name of the recipe, which also names the target directory.
    recipe: &'static str,
    title: &'static str,
    /// The arguments of cargo.
    args: &'static [&'static str],
    /// The names of the programs.
    programs: &'static [&'static str],
}

const DRIVER: Build = Build {
    recipe: "earlier-version",
    title: "build the earlier version of the driver",
    args: &["build", "--locked", "--release", "--bins", "--package", "csi", "--package", "provisioner"],
    programs: &[CSI, PROVISIONER],
};
const CSI: &str = "loopfs-csi";
const PROVISIONER: &str = "loopfs-provisioner";

/// The pinned commit.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pin {
    commit: String,
    tree: String,
}

/// The programs and the manifests of the earlier version.
#[derive(Clone, Debug)]
pub(crate) struct EarlierVersion {
    /// Its commit, in as many digits as Git shows.
    pub(crate) name: String,
    pub(crate) csi: PathBuf,
    pub(crate) provisioner: PathBuf,
    /// A directory with the manifests below the same path as in a checkout.
    pub(crate) checkout: PathBuf,
}

/// Returns the earlier version from the cache, or builds it.
///
/// # Errors
/// The checkout does not have the commit, or the programs do not compile.
pub(crate) async fn earlier_version(session: &Session) -> Result<EarlierVersion> {
    let (pin, artifact) = built(session, &DRIVER).await?;
    let [csi, provisioner] = [CSI, PROVISIONER].map(|program| artifact.join(program));
    Ok(EarlierVersion { name: pin.commit.chars().take(12).collect(), csi, provisioner, checkout: artifact })
}

fn pin(root: &Path) -> Result<Pin> {
    let path = root.join(PIN);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("parse {}", path.display()))
}

/// Returns the pin, and the directory with the programs and the manifests.
async fn built(session: &Session, what: &Build) -> Result<(Pin, PathBuf)> {
    let root = session.workspace.root();
    let pin = pin(root)?;
    let recipe = Recipe::new(what.recipe, 1).with("tree", &pin.tree);
    let artifact = session
        .cache
        .artifact(&recipe, async |directory: &Path| build(session, root, &pin, what, directory).await)
        .await?;
    Ok((pin, artifact))
}

/// Builds programs of the pinned commit, and puts them into `directory` with the manifests.
async fn build(session: &Session, root: &Path, pin: &Pin, what: &Build, directory: &Path) -> Result<()> {
    require(root, pin).await?;
    // Beside the programs of this version and not among them: cargo does not distinguish the packages of two checkouts.
    let scratch = session.workspace.target().join(format!("{}-{}", what.recipe, pin.tree));
    let sources = scratch.join("sources");
    cache::remove_dir(&sources)?;
    export(root, &pin.commit, &[], &sources).await?;
    let built = programs_of(session, &sources, &scratch.join("target"), what.title, what.args).await?;
    for program in what.programs {
        let from = built.program(program)?;
        fs::copy(&from, directory.join(program)).with_context(|| format!("copy {}", from.display()))?;
    }
    export(root, &pin.commit, &[MANIFESTS], directory).await?;
    cache::remove_dir(&scratch)
}

/// Checks that the repository at `root` has the pinned commit with the pinned content. A shallow clone may not have it.
async fn require(root: &Path, pin: &Pin) -> Result<()> {
    let commit = &pin.commit;
    let tree =
        git(root).args(["rev-parse", "--verify", "--quiet", &format!("{commit}^{{tree}}")]).finish().await?;
    anyhow::ensure!(
        tree.status.success(),
        "the checkout {} does not have commit {commit}, the earlier version of {PIN}; fetch the history with `git \
         fetch --unshallow`, or, if the checkout is not shallow, with `git fetch origin {commit}`",
        root.display()
    );
    let tree = tree.stdout.trim();
    anyhow::ensure!(
        tree == pin.tree,
        "commit {commit} has the content {tree}, and {PIN} says {}; correct the file",
        pin.tree
    );
    Ok(())
}

/// Writes these paths of a commit, or all if there are none, into `directory`.
async fn export(root: &Path, commit: &str, paths: &[&str], directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let archive = directory.join(".export.tar");
    git(root)
        .args(["archive", "--format=tar", "--output"])
        .arg(&archive)
        .arg(commit)
        .args(paths)
        .run()
        .await?;
    Program::new("tar").arg("--extract").arg("--file").arg(&archive).current_dir(directory).run().await?;
    fs::remove_file(&archive).with_context(|| format!("remove {}", archive.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a repository with one commit, and returns its pin.
    async fn repository(root: &Path) -> Pin {
        fs::create_dir_all(root.join(MANIFESTS)).unwrap();
        fs::write(root.join(MANIFESTS).join("a.yaml"), "kind: A\n").unwrap();
        fs::write(root.join("other"), "").unwrap();
        let run = async |args: &[&str]| {
            let identity = ["-c", "user.name=a", "-c", "user.email=a@example"];
            git(root)
                .env("GIT_CONFIG_GLOBAL", "/dev/null")
                .args(identity)
                .args(args)
                .run()
                .await
                .unwrap()
                .stdout
                .trim()
                .to_owned()
        };
        run(&["init", "--quiet"]).await;
        run(&["add", "."]).await;
        run(&["commit", "--quiet", "--message", "a"]).await;
        Pin { commit: run(&["rev-parse", "HEAD"]).await, tree: run(&["rev-parse", "HEAD^{tree}"]).await }
    }

    #[tokio::test]
    async fn missing_commit_is_refused_with_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let pin = repository(directory.path()).await;
        require(directory.path(), &pin).await.unwrap();
        let absent = Pin { commit: "0123456789".repeat(4), ..pin.clone() };
        let error = format!("{:#}", require(directory.path(), &absent).await.unwrap_err());
        assert!(error.contains("git fetch --unshallow") && error.contains(&absent.commit), "{error}");
        let other = Pin { tree: "0".repeat(40), ..pin };
        let error = require(directory.path(), &other).await.unwrap_err().to_string();
        assert!(error.contains(PIN), "{error}");
    }

    /// The files have the content of the commit, not of the working tree.
    #[tokio::test]
    async fn export_contains_only_selected_paths() {
        let directory = tempfile::tempdir().unwrap();
        let (root, target) = (directory.path().join("checkout"), directory.path().join("export"));
        let pin = repository(&root).await;
        fs::write(root.join(MANIFESTS).join("a.yaml"), "kind: B\n").unwrap();
        export(&root, &pin.commit, &[MANIFESTS], &target).await.unwrap();
        assert_eq!(fs::read_to_string(target.join(MANIFESTS).join("a.yaml")).unwrap(), "kind: A\n");
        assert_eq!(fs::read_dir(&target).unwrap().count(), 1);
    }

    #[test]
    fn pin_has_commit_and_tree_ids() {
        let pin: Pin = toml::from_str(include_str!("../upgrade.toml")).unwrap();
        for id in [&pin.commit, &pin.tree] {
            assert!(id.len() == 40 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        }
    }
}
