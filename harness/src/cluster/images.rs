//! What a node is made of besides its specification: kernel, disks, container images.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::node_spec::NodeImages;
use super::programs::Programs;
use crate::cache::Recipe;
use crate::images::kernel::{Kernel, Module};
use crate::images::{disk, node};
use crate::session::Session;
use crate::vm::{Accelerator, choose};
use crate::{packages, rust_build};

/// Module sets of the kernel catalogue that a node needs.
const MODULE_SETS: [&str; 2] = ["boot", "node"];

/// Everything nodes share: read by each, changed by none.
#[derive(Debug)]
pub(crate) struct NodeParts {
    pub(crate) accelerator: Accelerator,
    pub(crate) kernel: PathBuf,
    pub(crate) modules: Vec<Module>,
    /// PID 1.
    pub(crate) init: PathBuf,
    pub(crate) root: PathBuf,
    pub(crate) tools_disk: PathBuf,
    pub(crate) images_disk: PathBuf,
    pub(crate) images: NodeImages,
}

impl NodeParts {
    pub(crate) async fn prepare(session: &Session, programs: &Programs) -> Result<NodeParts> {
        packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
        let guest = rust_build::guest_programs(session).await?;
        let kernel = Kernel::prepare(session, None).await?;
        let root = node::prepare(session, &kernel).await?;
        let accelerator = choose(session, &kernel, &guest.init).await?;
        let tools_disk = tools_disk(session, programs).await?;
        Ok(NodeParts {
            accelerator,
            kernel: kernel.vmlinuz(),
            modules: kernel.modules(&MODULE_SETS).await?,
            init: guest.init,
            root,
            images_disk: tools_disk.clone(),
            tools_disk,
            images: NodeImages { archives: Vec::new(), pause: "docker.io/library/pause:dev".into() },
        })
    }
}

/// The disk with the programs of Kubernetes that run on the node.
async fn tools_disk(session: &Session, programs: &Programs) -> Result<PathBuf> {
    let files = [
        ("kubelet".to_owned(), programs.kubelet.clone()),
        ("kube-proxy".to_owned(), programs.kube_proxy.clone()),
    ];
    let mut recipe = Recipe::new("kubernetes-node", 1);
    for (name, path) in &files {
        recipe = recipe.with(name, identity(path)?);
    }
    let artifact = session
        .cache
        .artifact(&recipe, async |dir: &Path| disk::payload(&dir.join("tools.ext4"), &files).await)
        .await?;
    Ok(artifact.join("tools.ext4"))
}

/// Enough to tell one build of a large program from another without reading it.
fn identity(path: &Path) -> Result<String> {
    let path = fs::canonicalize(path).with_context(|| format!("find {}", path.display()))?;
    let file = fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?;
    Ok(format!("{} {} {}.{}", path.display(), file.len(), file.mtime(), file.mtime_nsec()))
}
