//! Where a cluster keeps its files. Everything below one directory that only its owner can enter.

use std::path::{Path, PathBuf};

/// The directory of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    root: PathBuf,
    logs: PathBuf,
}

impl Layout {
    /// `root` holds keys and state, `logs` what people read afterwards; both must be absolute, since
    /// the components run in directories of their own.
    pub(crate) fn new(root: &Path, logs: &Path) -> Layout {
        Layout { root: root.to_owned(), logs: logs.to_owned() }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn logs(&self) -> &Path {
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

    /// The kubeconfig of a component or of the administrator.
    pub(crate) fn kubeconfig(&self, of: &str) -> PathBuf {
        self.root.join(format!("{of}.kubeconfig"))
    }

    pub(crate) fn log(&self, of: &str) -> PathBuf {
        self.logs.join(format!("{of}.log"))
    }

    /// Which requests the API server writes down, where it is to.
    pub(crate) fn audit_policy(&self) -> PathBuf {
        self.root.join("audit-policy.json")
    }

    /// What belongs to one node: its disks, its sockets.
    pub(crate) fn node_dir(&self, node: &str) -> PathBuf {
        self.root.join("nodes").join(node)
    }
}
