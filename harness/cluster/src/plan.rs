//! The contents of nodes that depend on the project under test.

use std::path::{Path, PathBuf};

use anyhow::Result;
use testvm::images::oci;

/// The programs, container images and data mount of the nodes of a cluster.
#[derive(Clone, Debug)]
pub struct NodePlan {
    /// The program `guest-init` of `testvm-guest`: PID 1 of the nodes.
    pub init: PathBuf,
    /// The program `pause` of `testvm-guest`, which holds the namespaces of a pod.
    pub pause: PathBuf,
    /// The container images of pods. A node pulls no images.
    pub images: Vec<ContainerImage>,
    /// The archives of more container images, as [`oci::Image`](testvm::images::oci::Image) writes them. Their file names differ.
    pub archives: Vec<PathBuf>,
    /// The mount of the data disk, an empty XFS.
    pub data_mount: DataMount,
    /// Programs in [`TOOLS_DIR`](super::TOOLS_DIR) besides those of Kubernetes: the name of each there, and its
    /// path on the host.
    pub tools: Vec<(String, PathBuf)>,
    /// Programs that run on the nodes besides those of Kubernetes, and start before them. If there are any, the programs of
    /// Kubernetes also write their logs to files ([`log_file`](super::log_file)), for services that read them.
    pub services: Vec<NodeService>,
    /// Symbolic links in the root file system of the nodes.
    pub links: Vec<Link>,
}

/// A program that runs on every node. The variable `NODE_NAME` has the name of the Node object.
#[derive(Clone, Debug)]
pub struct NodeService {
    /// Its name in the log.
    pub name: String,
    /// Its command line.
    pub argv: Vec<String>,
    /// The unix socket on which it listens when it is ready.
    pub socket: String,
    /// The user of its kubeconfig at the API server, who has no rights unless the caller grants them.
    pub user: String,
}

impl NodeService {
    /// Returns the path of the kubeconfig on the node of a service called `name`.
    #[must_use]
    pub fn kubeconfig(name: &str) -> String {
        format!("/etc/kubernetes/{name}.kubeconfig")
    }
}

/// A symbolic link.
#[derive(Clone, Debug)]
pub struct Link {
    /// Its absolute path, below an existing directory.
    pub path: String,
    /// The path that it points to.
    pub target: String,
}

/// A container image of static programs.
#[derive(Clone, Debug)]
pub struct ContainerImage {
    /// The file name of its archive, such as `driver.tar`.
    pub archive: &'static str,
    /// The complete reference that pods name, such as `docker.io/library/driver:dev`.
    pub reference: &'static str,
    /// The path of each program in the image, and its path on the host.
    pub files: Vec<(&'static str, PathBuf)>,
}

impl ContainerImage {
    /// Writes the archive of the image into `directory`, and returns its path.
    ///
    /// # Errors
    /// A program cannot be read, or the archive cannot be written.
    pub fn write(&self, directory: &Path) -> Result<PathBuf> {
        let path = directory.join(self.archive);
        let programs: Vec<_> = self.files.iter().map(|(path, host)| (*path, host.as_path())).collect();
        oci::archive(&path, self.reference, &programs)?;
        Ok(path)
    }
}

/// The mount of a node's data disk.
#[derive(Clone, Debug)]
pub struct DataMount {
    /// The mount point, which the node creates.
    pub mount_point: String,
    /// The mount options, as in fstab.
    pub options: String,
}
