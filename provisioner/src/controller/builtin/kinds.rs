//! The kinds of managed objects, and the fields of each.

use std::fmt;
use std::sync::LazyLock;

use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};

/// A kind of object that a ConfigMap may declare.
#[derive(Debug)]
pub(crate) struct ManagedKind {
    pub(crate) group: &'static str,
    pub(crate) name: &'static str,
    plural: &'static str,
    pub(crate) namespaced: bool,
    /// The controller never deletes an object of this kind, not even to create it again.
    pub(crate) kept: bool,
    /// The member that contains the fields; `None` if the object itself does.
    pub(crate) within: Option<&'static str>,
    /// The fields, each with the value that the API server sets if the field is missing. Null stands for absent or empty, which have the
    /// same meaning.
    pub(crate) defaults: Value,
    /// The immutable fields: to change one, the object must be deleted and created again.
    pub(crate) immutable: &'static [&'static str],
}

impl ManagedKind {
    pub(crate) fn of(api_version: &str, kind: &str) -> Option<&'static ManagedKind> {
        KINDS.iter().find(|known| known.name == kind && known.api_version() == api_version)
    }

    pub(crate) fn named(kind: &str) -> Option<&'static ManagedKind> {
        KINDS.iter().find(|known| known.name == kind)
    }

    pub(crate) fn api_version(&self) -> String {
        format!("{}/v1", self.group)
    }

    pub(crate) fn resource(&self) -> ApiResource {
        let kind = GroupVersionKind::gvk(self.group, "v1", self.name);
        ApiResource::from_gvk_with_plural(&kind, self.plural)
    }
}

pub(crate) const RBAC: &str = "rbac.authorization.k8s.io";
const STORAGE: &str = "storage.k8s.io";

pub(crate) static KINDS: LazyLock<[ManagedKind; 7]> = LazyLock::new(|| {
    let kind = |group, name, plural, defaults, immutable| ManagedKind {
        group,
        name,
        plural,
        namespaced: false,
        kept: false,
        within: None,
        defaults,
        immutable,
    };
    let driver = json!({
        "attachRequired": true, "volumeLifecycleModes": ["Persistent"], "podInfoOnMount": false,
        "fsGroupPolicy": "ReadWriteOnceWithFSType", "storageCapacity": false, "requiresRepublish": false,
        "seLinuxMount": false, "tokenRequests": null,
    });
    let class = json!({
        "provisioner": null, "parameters": null, "reclaimPolicy": "Delete", "volumeBindingMode": "Immediate",
        "allowVolumeExpansion": false, "mountOptions": null, "allowedTopologies": null,
    });
    let priority = json!({
        "value": 0, "preemptionPolicy": "PreemptLowerPriority", "globalDefault": false, "description": null,
    });
    let role = json!({"rules": null, "aggregationRule": null});
    let binding = json!({"roleRef": null, "subjects": null});
    let fixed_of_class: &[_] = &["provisioner", "parameters", "reclaimPolicy", "volumeBindingMode"];
    [
        ManagedKind {
            // While it does not exist, the kubelet applies no fsGroup to volumes without a file system type, and waits for an attachment.
            kept: true,
            within: Some("spec"),
            ..kind(STORAGE, "CSIDriver", "csidrivers", driver, &["attachRequired", "volumeLifecycleModes"])
        },
        kind(STORAGE, "StorageClass", "storageclasses", class, fixed_of_class),
        kind(
            "scheduling.k8s.io",
            "PriorityClass",
            "priorityclasses",
            priority,
            &["value", "preemptionPolicy"],
        ),
        kind(RBAC, "ClusterRole", "clusterroles", role.clone(), &[]),
        kind(RBAC, "ClusterRoleBinding", "clusterrolebindings", binding.clone(), &["roleRef"]),
        ManagedKind { namespaced: true, ..kind(RBAC, "Role", "roles", role, &[]) },
        ManagedKind { namespaced: true, ..kind(RBAC, "RoleBinding", "rolebindings", binding, &["roleRef"]) },
    ]
});

/// The identity of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ObjectKey {
    pub(crate) kind: &'static str,
    pub(crate) namespace: Option<String>,
    pub(crate) name: String,
}

impl ObjectKey {
    pub(crate) fn of(kind: &ManagedKind, object: &DynamicObject) -> Self {
        let namespace = object.metadata.namespace.clone().filter(|_| kind.namespaced);
        ObjectKey { kind: kind.name, namespace, name: object.metadata.name.clone().unwrap_or_default() }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ObjectKey { kind, namespace, name } = self;
        match namespace {
            Some(namespace) => write!(f, "{kind} {namespace}/{name}"),
            None => write!(f, "{kind} {name}"),
        }
    }
}
