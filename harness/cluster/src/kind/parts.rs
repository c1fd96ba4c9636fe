//! The disks of a machine with Docker and kind, built once.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::cache::{self, Recipe};
use testvm::images::disk;
use testvm::images::kernel::Kernel;
use testvm::images::kind::Description;
use testvm::packages;
use testvm::session::Session;
use testvm::vm::{Disk, DiskMode};

use super::node_image::{self, NodeImage};
use crate::docker::{DOCKER_DISK, Devices, DockerMachine, bash};
use crate::plan::ContainerImage;
use crate::programs::{KIND_MINOR, Programs};
use crate::release::KubernetesMinor;
use crate::variant::Kubelet;

/// The disk that holds the node image while Docker imports it.
const NODE_DISK: &str = "node";
/// The memory of the machine: a control plane and a node in one.
pub(super) const MEMORY_MIB: u32 = 6144;
/// The file of Docker's disk in its artifact.
const DOCKER_FILE: &str = "docker.ext4";
/// The import of the node image hashes and unpacks a gigabyte, on an emulated and busy processor.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(1500);

/// The contents of the machine that depend on the project under test.
#[derive(Clone, Debug)]
pub struct KindPlan {
    /// The program `guest-init` of `testvm-guest`: PID 1 of the machine.
    pub init: PathBuf,
    /// The program `pause` of `testvm-guest`, which holds the namespaces of a pod.
    pub pause: PathBuf,
    /// The container images of pods. Their archives are in `target/images` of [`CHECKOUT`](super::CHECKOUT).
    pub images: Vec<ContainerImage>,
    /// Files of [`CHECKOUT`](super::CHECKOUT): the path there and the path on the host.
    pub files: Vec<(String, PathBuf)>,
}

/// The parts of a machine with Docker and kind.
#[derive(Debug)]
pub struct KindParts {
    pub(super) machine: DockerMachine,
    /// The disk of Docker, which has the node image.
    pub(super) docker_disk: PathBuf,
    pub(super) node_image: NodeImage,
    pub(super) kubectl: PathBuf,
    pub(super) plan: KindPlan,
}

impl KindParts {
    /// Builds all parts that are not in the cache.
    ///
    /// # Errors
    /// A part cannot be fetched or built, or the error of `plan`.
    pub async fn build(
        session: &Session,
        plan: impl Future<Output = Result<KindPlan>>,
        kubernetes: KubernetesMinor,
    ) -> Result<KindParts> {
        packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
        let description = Description::read(session)?;
        let system = async {
            let kernel = Kernel::prepare(session, None).await?;
            let root = description.machine_root(session, &kernel).await?;
            anyhow::Ok((kernel, root))
        };
        anyhow::ensure!(
            kubernetes == KIND_MINOR,
            "kind runs Kubernetes {} here, the release of kubeadm in vm-images/kind/go.mod, and not {}: leave \
             --kubernetes out",
            KIND_MINOR.name(),
            kubernetes.name()
        );
        let programs = Programs::ensure(session, Kubelet::Stock, kubernetes);
        let (plan, (kernel, root), programs) = tokio::try_join!(plan, system, programs)?;
        let machine = DockerMachine::prepare(session, &kernel, root, plan.init.clone()).await?;
        let node_image = node_image::prepare(session, &description, &programs, &plan.pause).await?;
        let docker_disk = docker_disk(session, &description, &machine, &node_image).await?;
        Ok(KindParts { machine, docker_disk, node_image, kubectl: programs.kubectl, plan })
    }

    /// Writes the archives of the images, and returns the files of the checkout with them.
    pub(super) fn checkout(&self, directory: &Path) -> Result<Vec<(String, PathBuf)>> {
        let mut files = self.plan.files.clone();
        for image in &self.plan.images {
            files.push((format!("target/images/{}", image.archive), image.write(directory)?));
        }
        Ok(files)
    }
}

/// Returns a disk on which Docker has the node image, from the cache or built in a virtual machine.
async fn docker_disk(
    session: &Session,
    description: &Description,
    machine: &DockerMachine,
    node_image: &NodeImage,
) -> Result<PathBuf> {
    let node = node_image.tar.parent().context("the node image is in an artifact")?;
    let root = machine.root().parent().context("the root is in an artifact")?;
    let recipe = Recipe::new("kind-docker", 1)
        .with_artifact("node image", node)
        .with_artifact("root", root)
        .with("import", import(&node_image.reference))
        .with("size", description.docker_mib().to_string());
    let artifact = session
        .cache
        .artifact(&recipe, async |directory: &Path| {
            let step = session.progress.step("import the node image into Docker");
            let image = directory.join(DOCKER_FILE);
            disk::empty_ext4(&image, description.docker_mib()).await?;
            let scratch = tempfile::tempdir().context("create a directory")?;
            let disks = vec![
                Disk { name: DOCKER_DISK.into(), image, mode: DiskMode::Persistent },
                Disk { name: NODE_DISK.into(), image: node_image.tar.clone(), mode: DiskMode::ReadOnly },
            ];
            let logs = session.workspace.target().join("kind-docker-logs");
            // The logs of an earlier import must not be read as those of this one.
            cache::empty_dir(&logs)?;
            let (mounts, forwards) = (Vec::new(), Vec::new());
            let devices = Devices { disks, mounts, forwards, memory_mib: MEMORY_MIB, logs };
            step.note("booting");
            let vm = machine.boot(devices, scratch.path()).await?;
            step.note("importing");
            bash(vm.control(), &import(&node_image.reference), IMPORT_TIMEOUT).await?;
            vm.power_off().await?;
            step.done("");
            Ok(())
        })
        .await?;
    Ok(artifact.join(DOCKER_FILE))
}

/// Returns the commands that import the node image from its disk. The settings are those of kind's Dockerfile.
fn import(reference: &str) -> String {
    format!(
        r#"serial=$(grep -lx {NODE_DISK} /sys/block/*/serial)
docker import --change 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]' --change 'ENV container=docker' \
  --change 'STOPSIGNAL SIGRTMIN+3' - {reference} < "/dev/$(basename "$(dirname "$serial")")""#
    )
}
