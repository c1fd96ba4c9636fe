//! The images of kind, as `kind/kind.toml` of the definitions describes them: the root file system of a machine that
//! runs Docker and kind, and the node image whose container is a node of Kubernetes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use super::debian::{Bootstrap, MINBASE, Selection};
use super::kernel::Kernel;
use super::node::{CONTAINERD, DebianRoot, ROOT_FILE, excluded, utf8};
use super::{debian_versions, oci};
use crate::cache::Recipe;
use crate::go_build::{self, Sources};
use crate::session::Session;

/// The file of the node image in its artifact, for `docker import`.
const NODE_FILE: &str = "node.tar";
/// The script that turns a Debian root file system into a node image.
const NODE_SCRIPT: &str = "kind/node-image";
/// The files of the base image in kind's module.
const BASE_FILES: &str = "images/base/files";

/// The description of both images.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    docker_mib: u64,
    machine: DebianRoot,
    node: Node,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Node {
    suite: String,
    packages: Vec<String>,
    exclude: Vec<String>,
}

/// The programs of a node image besides containerd, and the images of its control plane.
#[derive(Clone, Debug)]
pub struct NodePrograms {
    pub kubelet: PathBuf,
    pub kubectl: PathBuf,
    pub kubeadm: PathBuf,
    /// Their version, such as `v1.36.3`.
    pub version: String,
    /// kind's module.
    pub kind_sources: Sources,
    /// The reference of each image, and its files: the path in the image and the path here. The image runs the first.
    pub images: Vec<(String, Vec<(String, PathBuf)>)>,
    /// A text that depends on the contents of these programs and of the files of the images.
    pub identity: String,
}

impl Description {
    /// Reads the description.
    pub fn read(session: &Session) -> Result<Description> {
        session.workspace.definition("kind/kind.toml")
    }

    /// Returns the size of the file system of Docker's images and containers.
    pub fn docker_mib(&self) -> u64 {
        self.docker_mib
    }

    /// Returns the ext4 image of the machine's root with the modules of `kernel`, from the cache or built.
    pub async fn machine_root(&self, session: &Session, kernel: &Kernel) -> Result<PathBuf> {
        let recipe = Recipe::new("docker-root", 2);
        let artifact = self.machine.artifact(session, "Docker machine", recipe, kernel, None).await?;
        Ok(artifact.join(ROOT_FILE))
    }

    /// Returns the file system of the node image as a tar file, from the cache or built.
    pub async fn node(&self, session: &Session, programs: &NodePrograms) -> Result<PathBuf> {
        let containerd = go_build::build(session, &CONTAINERD).await?;
        let script = session.workspace.definitions().join(NODE_SCRIPT);
        let Node { suite, packages, exclude } = &self.node;
        let selection = Selection::new(suite, MINBASE, packages);
        let mut recipe = Recipe::new("kind-node", 2)
            .with("exclude", exclude.join(","))
            .with_file("script", &script)?
            .with("version", &programs.version)
            .with("kind", &programs.kind_sources.checksum)
            .with("programs", &programs.identity)
            .with_artifact("containerd", &containerd);
        for (reference, files) in &programs.images {
            recipe = recipe.with("image", reference);
            for (path, _) in files {
                recipe = recipe.with("file", path);
            }
        }
        let build = async |directory: &Path| -> Result<()> {
            let step = session.progress.step("build the node image for kind");
            let archives = tempfile::tempdir_in(directory).context("create a directory")?;
            for (index, (reference, files)) in programs.images.iter().enumerate() {
                let files: Vec<_> =
                    files.iter().map(|(path, host)| (path.as_str(), host.as_path())).collect();
                oci::archive(&archives.path().join(format!("{index}.tar")), reference, &files)?;
            }
            let hook = hook(&script, programs, &containerd, archives.path())?;
            Bootstrap::new(&selection)
                .await?
                .args(excluded(exclude).chain([hook]))
                .run(&directory.join(NODE_FILE), &step)
                .await?;
            step.done("");
            Ok(())
        };
        let artifact =
            debian_versions::artifact(session, "kind node image", &selection, recipe, build).await?;
        Ok(artifact.join(NODE_FILE))
    }
}

/// Returns the argument that has mmdebstrap run the script.
fn hook(script: &Path, programs: &NodePrograms, containerd: &Path, archives: &Path) -> Result<String> {
    let base_files = programs.kind_sources.directory.join(BASE_FILES);
    let variables = [
        ("KIND_FILES", utf8(&base_files)?),
        ("CONTAINERD", utf8(containerd)?),
        ("KUBELET", utf8(&programs.kubelet)?),
        ("KUBECTL", utf8(&programs.kubectl)?),
        ("KUBEADM", utf8(&programs.kubeadm)?),
        ("VERSION", programs.version.as_str()),
        ("IMAGES", utf8(archives)?),
    ];
    let set: String = variables.iter().map(|(name, value)| format!("{name}='{value}' ")).collect();
    Ok(format!("--customize-hook={set}sh '{}' \"$1\"", utf8(script)?))
}
