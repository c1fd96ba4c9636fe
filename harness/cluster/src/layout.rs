//! The files of a cluster, all below one directory that only its owner can enter.

use std::path::{Path, PathBuf};

/// The directory of one cluster.
#[derive(Clone, Debug)]
pub struct Layout {
    root: PathBuf,
    logs: PathBuf,
}

impl Layout {
    /// Creates the layout. `root` holds keys and state, `logs` the logs. Both must be absolute, because the
    /// components have working directories of their own.
    pub(crate) fn new(root: &Path, logs: &Path) -> Layout {
        Layout { root: root.to_owned(), logs: logs.to_owned() }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
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
