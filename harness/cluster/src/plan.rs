//! The contents of nodes that depend on the project under test.

use std::path::PathBuf;

/// The programs, container images and data mount of the nodes of a cluster.
#[derive(Clone, Debug)]
pub struct NodePlan {
    /// The program `guest-init` of `testvm-guest`: PID 1 of the nodes.
    pub init: PathBuf,
    /// The program `pause` of `testvm-guest`, which holds the namespaces of a pod.
    pub pause: PathBuf,
    /// The container images of pods. A node pulls no images.
    pub images: Vec<ContainerImage>,
    /// The mount of the data disk, an empty XFS.
    pub data_mount: DataMount,
    /// Programs in [`TOOLS_DIR`](super::TOOLS_DIR) besides those of Kubernetes: the name of each there, and its
    /// path on the host.
    pub tools: Vec<(String, PathBuf)>,
    /// Symbolic links in the root file system of the nodes.
    pub links: Vec<Link>,
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

/// The mount of a node's data disk.
#[derive(Clone, Debug)]
pub struct DataMount {
    /// The mount point, which the node creates.
    pub mount_point: String,
    /// The mount options, as in fstab.
    pub options: String,
}
