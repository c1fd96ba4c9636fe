//! The root file system of a Kubernetes node, as `node/node.toml` of the definitions describes it, with containerd from its Go
//! module.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use super::debian::{Bootstrap, Selection, Variant, as_root};
use super::debian_versions;
use super::disk::{self, Edit};
use super::kernel::Kernel;
use crate::cache::Recipe;
use crate::go_build::{self, GoModule, VersionVariable};
use crate::progress::Notes;
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
    suite: String,
    packages: Vec<String>,
    exclude: Vec<String>,
    size_mib: u64,
    no_tools: NoTools,
}

/// The difference between [`RootImage::NoTools`] and the default image.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NoTools {
    remove: Vec<String>,
}

/// A root file system of nodes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum RootImage {
    /// All packages of `node/node.toml`.
    #[default]
    Default,
    /// The same without the programs of `no_tools.remove` there, such as mount and losetup.
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
///
/// # Errors
/// The description cannot be read, a package cannot be fetched, containerd cannot be built, or a program to
/// remove is not in the image.
pub async fn prepare(session: &Session, kernel: &Kernel, image: RootImage) -> Result<RootImages> {
    let description: Description = session.workspace.definition("node/node.toml")?;
    let containerd = go_build::build(session, &CONTAINERD).await?;
    let root = DebianRoot {
        suite: &description.suite,
        packages: &description.packages,
        exclude: &description.exclude,
        size_mib: description.size_mib,
    };
    let recipe = Recipe::new("node-root", 3)
        .with("exclude", description.exclude.join(","))
        .with("size", description.size_mib.to_string())
        .with_artifact("kernel", kernel.artifact())
        .with_artifact("containerd", &containerd);
    let build = async |directory: &Path| -> Result<()> {
        let step = session.progress.step("build the node's root file system");
        let programs: Vec<_> = CONTAINERD_PROGRAMS.map(|program| containerd.join(program)).into();
        build(&root, kernel, &programs, directory, step.notes()).await?;
        step.done("");
        Ok(())
    };
    let artifact = debian_versions::artifact(session, "node image", &root.selection(), recipe, build).await?;
    let root = artifact.join(ROOT_FILE);
    match image {
        RootImage::Default => Ok(RootImages { root, inspection: None }),
        RootImage::NoTools => {
            let without = without_tools(session, &artifact, &description.no_tools.remove).await?;
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
            disk::copy(&default.join(ROOT_FILE), &image)?;
            let edits: Vec<_> = removed.iter().map(|path| Edit::Remove { path }).collect();
            disk::edit_ext4(&image, &edits).await
        })
        .await?;
    Ok(artifact.join(ROOT_FILE))
}

/// A root file system of Debian packages.
pub(super) struct DebianRoot<'a> {
    pub(super) suite: &'a str,
    pub(super) packages: &'a [String],
    /// The patterns of files to omit.
    pub(super) exclude: &'a [String],
    pub(super) size_mib: u64,
}

impl DebianRoot<'_> {
    pub(super) fn selection(&self) -> Selection<'_> {
        Selection { suite: self.suite, variant: Variant::Minbase, packages: self.packages, options: &[] }
    }
}

/// Builds [`ROOT_FILE`] in `directory`: the packages, the modules of `kernel`, and `programs` in `/usr/local/bin`.
pub(super) async fn build(
    root: &DebianRoot<'_>,
    kernel: &Kernel,
    programs: &[PathBuf],
    directory: &Path,
    notes: Notes,
) -> Result<()> {
    let tar = directory.join("root.tar");
    let modules = kernel.modules_directory();
    let modules = utf8(&modules)?;
    let release = kernel.release();
    // The modules are added and indexed for the node's modprobe before the tar file is written.
    let mut hooks = vec![
        "--customize-hook=mkdir -p \"$1/usr/lib/modules\"".to_owned(),
        format!("--customize-hook=copy-in '{modules}' /usr/lib/modules"),
        format!("--customize-hook=chroot \"$1\" depmod {release}"),
    ];
    if !programs.is_empty() {
        let paths =
            programs.iter().map(|path| Ok(format!(" '{}'", utf8(path)?))).collect::<Result<String>>()?;
        hooks.push(format!("--customize-hook=copy-in{paths} /usr/local/bin"));
    }
    Bootstrap::new(&root.selection())
        .await?
        .args(excluded(root.exclude).chain(hooks))
        .run(&tar, move |line| notes.note(line.to_owned()))
        .await?;
    to_ext4(&tar, directory, root.size_mib).await?;
    fs::remove_file(&tar).with_context(|| format!("remove {}", tar.display()))
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
