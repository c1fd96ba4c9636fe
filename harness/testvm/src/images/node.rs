//! The root file system of a Kubernetes node, as `node/node.toml` of the definitions describes it, with containerd from its Go
//! module.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use super::debian::{Bootstrap, MINBASE, Selection, as_root};
use super::debian_versions;
use super::disk;
use super::kernel::Kernel;
use crate::cache::Recipe;
use crate::go_build::{self, GoModule, VersionVariable};
use crate::session::Session;

/// The container runtime, with its shim and its command line tool.
pub(super) const CONTAINERD: GoModule = GoModule {
    version_variables: &[VersionVariable {
        variable: "github.com/containerd/containerd/v2/version.Version",
        value: |version| version.to_string(),
    }],
    ..GoModule::new("containerd", "github.com/containerd/containerd/v2")
};
/// The file of the image in its artifact.
pub(super) const ROOT_FILE: &str = "root.ext4";
const CONTAINERD_PROGRAMS: [&str; 3] = ["containerd", "containerd-shim-runc-v2", "ctr"];

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    root: DebianRoot,
    /// The files that [`RootImage::NoTools`] lacks.
    no_tools: Vec<String>,
}

/// A root file system of Debian packages.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DebianRoot {
    suite: String,
    packages: Vec<String>,
    /// The patterns of files to omit.
    exclude: Vec<String>,
    size_mib: u64,
}

/// A root file system of nodes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum RootImage {
    /// All packages of `node/node.toml`.
    #[default]
    Default,
    /// The same without the programs of `no_tools` there, such as mount and losetup.
    NoTools,
}

/// The ext4 images of a node's root. Runs share them: boot one as a scratch disk, or copy it first.
#[derive(Clone, Debug)]
pub struct RootImages {
    /// The root file system.
    pub root: PathBuf,
    /// For [`RootImage::NoTools`], the default image, so that tests can inspect the node with the programs that
    /// `root` lacks.
    pub inspection: Option<PathBuf>,
}

/// Returns the images of a node's root with the modules of `kernel`.
pub async fn prepare(session: &Session, kernel: &Kernel, image: RootImage) -> Result<RootImages> {
    let description: Description = session.workspace.definition("node/node.toml")?;
    let containerd = go_build::build(session, &CONTAINERD).await?;
    let recipe = Recipe::new("node-root", 3);
    let artifact =
        description.root.artifact(session, "node image", recipe, kernel, Some(&containerd)).await?;
    let root = artifact.join(ROOT_FILE);
    match image {
        RootImage::Default => Ok(RootImages { root, inspection: None }),
        RootImage::NoTools => {
            let without = without_tools(session, &artifact, &description.no_tools).await?;
            Ok(RootImages { root: without, inspection: Some(root) })
        }
    }
}

/// Returns a copy of the default image without these files.
async fn without_tools(session: &Session, default: &Path, removed: &[String]) -> Result<PathBuf> {
    let recipe = Recipe::new("node-root-no-tools", 1)
        .with_artifact("root", default)
        .with("removed", removed.join(","));
    let artifact = session
        .cache
        .artifact(&recipe, async |directory: &Path| {
            let image = directory.join(ROOT_FILE);
            disk::copy(&default.join(ROOT_FILE), &image).await?;
            let commands: Vec<_> = removed.iter().map(|path| format!("rm {path}")).collect();
            disk::edit_ext4(&image, &commands).await
        })
        .await?;
    Ok(artifact.join(ROOT_FILE))
}

impl DebianRoot {
    /// Returns the artifact with [`ROOT_FILE`], from the cache or built: the packages, the modules of `kernel`, and the programs of
    /// the artifact `containerd` in `/usr/local/bin`.
    pub(super) async fn artifact(
        &self,
        session: &Session,
        what: &str,
        recipe: Recipe,
        kernel: &Kernel,
        containerd: Option<&Path>,
    ) -> Result<PathBuf> {
        let mut recipe = recipe
            .with("exclude", self.exclude.join(","))
            .with("size", self.size_mib.to_string())
            .with_artifact("kernel", kernel.artifact());
        if let Some(containerd) = containerd {
            recipe = recipe.with_artifact("containerd", containerd);
        }
        let selection = Selection::new(&self.suite, MINBASE, &self.packages);
        debian_versions::artifact(session, what, &selection, recipe, async |directory: &Path| {
            let step = session.progress.step(format!("build the {what}"));
            let tar = directory.join("root.tar");
            // The modules are added and indexed for the node's modprobe before the tar file is written.
            let mut hooks = vec![
                "--customize-hook=mkdir -p \"$1/usr/lib/modules\"".to_owned(),
                format!("--customize-hook=copy-in '{}' /usr/lib/modules", utf8(&kernel.modules_directory())?),
                format!("--customize-hook=chroot \"$1\" depmod {}", kernel.release()),
            ];
            if let Some(containerd) = containerd {
                let directory = utf8(containerd)?;
                let paths = CONTAINERD_PROGRAMS.map(|program| format!("'{directory}/{program}'")).join(" ");
                hooks.push(format!("--customize-hook=copy-in {paths} /usr/local/bin"));
            }
            let bootstrap = Bootstrap::new(&selection).await?.args(excluded(&self.exclude).chain(hooks));
            bootstrap.run(&tar, &step).await?;
            to_ext4(&tar, directory, self.size_mib).await?;
            fs::remove_file(&tar).with_context(|| format!("remove {}", tar.display()))?;
            step.done("");
            Ok(())
        })
        .await
    }
}

/// Returns the arguments that omit files of packages.
pub(super) fn excluded(patterns: &[String]) -> impl Iterator<Item = String> {
    patterns.iter().map(|pattern| format!("--dpkgopt=path-exclude={pattern}"))
}

pub(super) fn utf8(path: &Path) -> Result<&str> {
    path.to_str().context("the path of the cache is not UTF-8")
}

/// Unpacks, packs and removes the files in one user namespace, because they have more owners than a user has
/// ids.
async fn to_ext4(tar: &Path, directory: &Path, size_mib: u64) -> Result<()> {
    // Device nodes are omitted: an ordinary user cannot create them, and the guest mounts devtmpfs.
    const SCRIPT: &str = "\
set -e
trap 'rm -rf root' EXIT
mkdir root
tar --extract --numeric-owner --xattrs --xattrs-include='*' --exclude='./dev/*' --file \"$1\" --directory root
truncate --size \"$2M\" root.ext4
mke2fs -q -F -t ext4 -m 0 -J size=16 -E lazy_itable_init=0,lazy_journal_init=0 -d root root.ext4";
    as_root("sh")
        .args(["-c", SCRIPT, "sh"])
        .arg(tar)
        .arg(size_mib.to_string())
        .current_dir(directory)
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .run()
        .await
        .context("make an ext4 image of the node's root")?;
    Ok(())
}
