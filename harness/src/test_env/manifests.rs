//! The manifests of the driver and of node-debug, as users apply them.

use std::path::{Path, PathBuf};

use anyhow::Result;
use testvm::session::Session;

pub(crate) use testvm_cluster::manifests::Manifests;

/// Reads the manifests that a user applies.
pub(crate) fn of_driver(session: &Session) -> Result<Manifests> {
    of_checkout(session.workspace.root())
}

/// Reads the manifests that a user applies from another checkout.
pub(crate) fn of_checkout(root: &Path) -> Result<Manifests> {
    Manifests::read(&root.join("csi").join("deploy"))
}

/// Reads the manifests with the rights of node-debug and of the account of `dbg kubectl`.
pub(crate) fn of_node_debug(session: &Session) -> Result<Manifests> {
    Manifests::read_files(&node_debug_files(session.workspace.root(), &["rbac.yaml", "viewer.yaml"]))
}

/// Reads the manifests that let the account of `dbg kubectl` read the logs of the driver.
pub(crate) fn of_driver_logs(session: &Session) -> Result<Manifests> {
    Manifests::read_files(&node_debug_files(session.workspace.root(), &["driver-logs.yaml"]))
}

fn node_debug_files(root: &Path, names: &[&str]) -> Vec<PathBuf> {
    let directory = root.join("csi").join("node-debug").join("deploy");
    names.iter().map(|name| directory.join(name)).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};

    use super::*;

    #[test]
    fn the_account_of_dbg_may_read_the_objects_of_a_storage_fault_and_nothing_else() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let manifests = Manifests::read_files(&node_debug_files(root, &["viewer.yaml"])).unwrap();
        let role: ClusterRole = manifests.only("ClusterRole").unwrap();
        let binding: ClusterRoleBinding = manifests.only("ClusterRoleBinding").unwrap();
        assert_eq!(Some(binding.role_ref.name), role.metadata.name);
        let rules = role.rules.unwrap();
        let resources: Vec<String> =
            rules.iter().flat_map(|rule| rule.resources.iter().flatten().cloned()).collect();
        for resource in
            ["nodes", "persistentvolumes", "storageclasses", "csinodes", "volumeattachments", "pods"]
        {
            assert!(resources.iter().any(|granted| granted == resource), "{resource} in {resources:?}");
        }
        for resource in ["secrets", "configmaps", "pods/log", "pods/exec", "serviceaccounts/token", "*"] {
            assert!(!resources.iter().any(|granted| granted == resource), "{resource} in {resources:?}");
        }
        assert!(rules.iter().all(|rule| rule.verbs == ["get", "list", "watch"]), "{rules:?}");
    }
}
