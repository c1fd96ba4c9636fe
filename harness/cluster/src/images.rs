//! The parts of a node besides its specification: kernel, disks, container images.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use testvm::cache::Recipe;
use testvm::images::kernel::{Kernel, Module};
use testvm::images::{disk, node, oci};
use testvm::packages;
use testvm::session::Session;
use testvm::vm::{Hypervisor, choose};

use super::plan::{ContainerImage, NodePlan};
use super::programs::Programs;
use super::variant::NodeVariant;

/// Module sets of the kernel catalogue that a node needs.
pub(crate) const MODULE_SETS: [&str; 2] = ["boot", "node"];

/// The image of the container that holds a pod's namespaces.
pub(crate) const PAUSE: &str = "docker.io/library/pause:dev";

/// The read-only parts that all nodes share.
#[derive(Debug)]
pub(crate) struct NodeParts {
    pub(crate) hypervisor: Hypervisor,
    pub(crate) kernel: Kernel,
    pub(crate) modules: Vec<Module>,
    pub(crate) root: PathBuf,
    /// A disk with the programs that `root` lacks.
    pub(crate) inspection: Option<PathBuf>,
    pub(crate) images_disk: PathBuf,
    /// The names of the archives on that disk, which a node imports when it boots.
    pub(crate) archives: Vec<String>,
    pub(crate) plan: NodePlan,
    pub(crate) variant: NodeVariant,
}

impl NodeParts {
    /// Builds all parts of `plan`, or takes them from the cache. Builds and downloads run concurrently.
    pub(crate) async fn prepare(
        session: &Session,
        variant: &NodeVariant,
        plan: impl Future<Output = Result<NodePlan>>,
    ) -> Result<NodeParts> {
        packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
        let system = async {
            let kernel = Kernel::prepare(session, variant.kernel.as_deref()).await?;
            let roots = node::prepare(session, &kernel, variant.root).await?;
            anyhow::Ok((kernel, roots))
        };
        let (plan, (kernel, roots)) = tokio::try_join!(plan, system)?;
        let hypervisor = choose(session, &kernel, &plan.init).await?;
        let files = vec![("/pause", plan.pause.clone())];
        let pause = ContainerImage { archive: "pause.tar", reference: PAUSE, files };
        let images: Vec<_> = [pause].into_iter().chain(plan.images.iter().cloned()).collect();
        let archives = plan.archives.iter().map(|archive| file_name(archive)).collect::<Result<Vec<_>>>()?;
        Ok(NodeParts {
            hypervisor,
            kernel: kernel.clone(),
            modules: kernel.modules(&MODULE_SETS).await?,
            root: roots.root,
            inspection: roots.inspection,
            images_disk: images_disk(session, &images, &plan.archives).await?,
            archives: images.iter().map(|image| image.archive.to_owned()).chain(archives).collect(),
            plan,
            variant: variant.clone(),
        })
    }
}

fn file_name(path: &Path) -> Result<String> {
    let name = path.file_name().and_then(|name| name.to_str());
    Ok(name.with_context(|| format!("{} is not the path of an archive", path.display()))?.to_owned())
}

/// Returns the disk with the archives of the images that pods on the node use: those of `images`, and `archives`.
async fn images_disk(session: &Session, images: &[ContainerImage], archives: &[PathBuf]) -> Result<PathBuf> {
    let mut recipe = Recipe::new("node-images", 1);
    for image in images {
        recipe = recipe.with("image", image.reference);
        for (path, host) in &image.files {
            recipe = recipe.with_file(path, host)?;
        }
    }
    for archive in archives {
        recipe = recipe.with_file(&file_name(archive)?, archive)?;
    }
    let artifact = session
        .cache
        .artifact(&recipe, async |dir: &Path| {
            let more = archives.iter().map(|archive| Ok((file_name(archive)?, archive.clone())));
            let mut files = more.collect::<Result<Vec<_>>>()?;
            for image in images {
                files.push((image.archive.to_owned(), image.write(dir)?));
            }
            disk::payload(&dir.join("images.ext4"), &files).await
        })
        .await?;
    // Users who need the images on another cluster find the archives here.
    let shown = session.workspace.target().join("images");
    fs::create_dir_all(&shown).with_context(|| format!("make {}", shown.display()))?;
    for image in images {
        let from = artifact.join(image.archive);
        oci::verify(&from).map_err(|error| {
            let directory = artifact.display();
            anyhow!(
                "{error:#}; remove the directory {directory}, and run this again, which builds the images"
            )
        })?;
        // A run that is killed here leaves no part of an archive under its name.
        let (copy, to) = (shown.join(format!(".{}.new", image.archive)), shown.join(image.archive));
        let copied = fs::copy(&from, &copy).and_then(|_| fs::rename(&copy, &to));
        copied.with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
    }
    Ok(artifact.join("images.ext4"))
}

/// Returns the disk with the Kubernetes programs that run on the node, and `more`.
pub(crate) async fn tools_disk(
    session: &Session,
    programs: &Programs,
    more: &[(String, PathBuf)],
) -> Result<PathBuf> {
    let mut files = vec![
        ("kubelet".to_owned(), programs.kubelet.clone()),
        ("kube-proxy".to_owned(), programs.kube_proxy.clone()),
        ("kubectl".to_owned(), programs.kubectl.clone()),
    ];
    files.extend_from_slice(more);
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

/// Returns a text that distinguishes builds of a large program without reading it.
pub(crate) fn identity(path: &Path) -> Result<String> {
    let path = fs::canonicalize(path).with_context(|| format!("find {}", path.display()))?;
    let file = fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?;
    Ok(format!("{} {} {}.{}", path.display(), file.len(), file.mtime(), file.mtime_nsec()))
}
