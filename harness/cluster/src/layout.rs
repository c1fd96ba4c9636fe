//! The specification of a cluster, and its files, all below one directory that only its owner can enter.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::cache;

/// The specification of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// The directory of its keys, its state and its disks. It is emptied first.
    pub dir: PathBuf,
    /// The directory of the logs of all components. It is emptied, too.
    pub logs: PathBuf,
    /// How durable the writes of the control plane's store are.
    pub durability: Durability,
    /// The use of the cluster.
    pub profile: ClusterProfile,
}

/// The durability of etcd's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// etcd acknowledges a write after it has reached the disk.
    Sync,
    /// etcd leaves writes in the page cache. For clusters that need not survive a power cut of the machine.
    Unsafe,
}

/// The use of a control plane, which decides some of its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterProfile {
    /// Tests and interactive use: the defaults of Kubernetes.
    Default,
    /// Benchmarks of provisioners. The API server logs every request in the audit log. kube-controller-manager,
    /// which binds the volumes, has no rate limit: its default of 20 requests a second would limit the
    /// measurement.
    Benchmark,
    /// The end-to-end tests of Kubernetes: the defaults of Kubernetes, and room for the volumes of several tests, some of
    /// which expand theirs by 1 GiB.
    Conformance,
}

impl ClusterProfile {
    /// Returns the memory of a node: enough for a kubelet, containerd, some pods, and the kernel's caches of
    /// very many files.
    pub(super) fn memory_mib(self) -> u32 {
        match self {
            ClusterProfile::Default => 2048,
            ClusterProfile::Benchmark | ClusterProfile::Conformance => 4096,
        }
    }

    /// Returns the size of the data disk, which is sparse on the host. Inodes of empty files take
    /// at most a quarter of it.
    pub(super) fn data_mib(self) -> u64 {
        match self {
            ClusterProfile::Default => 1024,
            ClusterProfile::Benchmark => 8192,
            ClusterProfile::Conformance => 32_768,
        }
    }
}

/// The directories of one cluster. They are absolute, because the components have working directories of their own.
#[derive(Clone, Debug)]
pub struct Layout {
    pub(crate) root: PathBuf,
    pub(crate) logs: PathBuf,
}

impl Layout {
    /// Empties the directories of a cluster.
    pub(crate) fn create(spec: &ClusterSpec) -> Result<Layout> {
        let emptied = |dir: &Path| {
            cache::empty_dir(dir)?;
            fs::canonicalize(dir).with_context(|| format!("find {}", dir.display()))
        };
        Ok(Layout { root: emptied(&spec.dir)?, logs: emptied(&spec.logs)? })
    }

    /// Returns the directory of the logs.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    pub(crate) fn pki_dir(&self) -> PathBuf {
        self.root.join("pki")
    }

    pub(crate) fn pki(&self, file: &str) -> PathBuf {
        self.pki_dir().join(file)
    }

    pub(crate) fn etcd_dir(&self) -> PathBuf {
        self.root.join("etcd")
    }

    /// Returns the path of the kubeconfig of a component or of the administrator.
    pub(crate) fn kubeconfig(&self, of: &str) -> PathBuf {
        self.root.join(format!("{of}.kubeconfig"))
    }

    /// Returns the path of the log of a component.
    pub fn log(&self, of: &str) -> PathBuf {
        self.logs.join(format!("{of}.log"))
    }

    /// Returns the path of the policy that selects the requests for the audit log.
    pub(crate) fn audit_policy(&self) -> PathBuf {
        self.root.join("audit-policy.json")
    }

    /// Returns the directory of one node's disks and sockets.
    pub(crate) fn node_dir(&self, node: &str) -> PathBuf {
        self.root.join("nodes").join(node)
    }
}
