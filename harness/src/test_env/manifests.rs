//! The manifests of the driver and of node-debug, as users apply them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::process::Program;
use testvm::session::Session;
pub(crate) use testvm_cluster::manifests::Manifests;

/// Reads the manifests that a user applies.
pub(crate) fn of_driver(session: &Session) -> Result<Manifests> {
    Manifests::read(&deploy(session.workspace.root()))
}

/// Reads the objects that the component claim-labels adds to those of the driver.
pub(crate) fn of_claim_labels(session: &Session) -> Result<Manifests> {
    Manifests::read(&deploy(session.workspace.root()).join("claim-labels"))
}

/// Reads manifests of node-debug.
pub(crate) fn of_node_debug(root: &Path, names: &[&str]) -> Result<Manifests> {
    let directory = root.join("csi").join("node-debug").join("deploy");
    Manifests::read_files(&names.iter().map(|name| directory.join(name)).collect::<Vec<_>>())
}

/// Renders the manifests of a checkout with one of their components, as a user adds it to `kustomization.yaml`.
pub(crate) async fn with_component(root: &Path, kubectl: &Path, component: &str) -> Result<Manifests> {
    let directory = tempfile::tempdir().context("create a temporary directory")?;
    let copy = directory.path().join("deploy");
    Program::new("cp").arg("--archive").args([&deploy(root), &copy]).run().await?;
    let path = copy.join("kustomization.yaml");
    let kustomization = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    std::fs::write(&path, format!("{kustomization}components:\n  - {component}\n"))
        .with_context(|| format!("write {}", path.display()))?;
    Manifests::render(kubectl, &copy).await
}

/// Renders the manifests of snapshot-controller.
pub(crate) async fn of_snapshot_controller(root: &Path, kubectl: &Path) -> Result<Manifests> {
    Manifests::render(kubectl, &deploy(root).join("snapshot-controller")).await
}

fn deploy(root: &Path) -> PathBuf {
    root.join("csi").join("deploy")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};

    use super::*;

    /// `namespace` in a user's kustomization moves the accounts, and changes no expression.
    #[test]
    fn no_admission_policy_names_a_namespace() {
        let deploy = deploy(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
        let components = ["builtin-objects", "claim-labels", "node-loss", "snapshots"];
        let directories = components.into_iter().map(|name| deploy.join(name)).chain([deploy.clone()]);
        let files: Vec<_> = directories.map(|directory| directory.join("admission.yaml")).collect();
        let manifests = Manifests::read_files(&files).unwrap();
        for object in manifests.objects() {
            let text = serde_json::to_string(object).unwrap();
            assert!(!text.contains("loopfs-system"), "{text}");
            assert!(!text.contains("validationActions") || text.contains(r#"["Deny","Audit"]"#), "{text}");
        }
    }

    #[test]
    fn dbg_account_reads_only_storage_objects() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let manifests = of_node_debug(root, &["viewer.yaml"]).unwrap();
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
