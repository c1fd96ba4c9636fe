//! The kinds of managed objects, and the fields of each.

use std::fmt;

use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};

/// A kind of object that a ConfigMap may declare.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ManagedKind {
    pub(crate) group: &'static str,
    pub(crate) name: &'static str,
    plural: &'static str,
    pub(crate) namespaced: bool,
    /// The controller never deletes an object of this kind, not even to create it again.
    pub(crate) kept: bool,
    /// The member that contains the fields; `None` if the object itself does.
    pub(crate) within: Option<&'static str>,
    pub(crate) fields: &'static [Field],
}

/// A field of a kind.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    /// The value that the API server sets if the field is missing.
    pub(crate) default: Default,
    /// Immutable: to change the field, the object must be deleted and created again.
    pub(crate) fixed: bool,
}

/// The default of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Default {
    /// Absent or empty, which have the same meaning.
    Empty,
    Bool(bool),
    Zero,
    Text(&'static str),
    One(&'static str),
}

impl Default {
    pub(crate) fn value(self) -> Value {
        match self {
            Default::Empty => Value::Null,
            Default::Bool(value) => json!(value),
            Default::Zero => json!(0),
            Default::Text(text) => json!(text),
            Default::One(text) => json!([text]),
        }
    }
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

const fn free(name: &'static str, default: Default) -> Field {
    Field { name, default, fixed: false }
}

const fn fixed(name: &'static str, default: Default) -> Field {
    Field { name, default, fixed: true }
}

pub(crate) const RBAC: &str = "rbac.authorization.k8s.io";

const ROLE: &[Field] = &[free("rules", Default::Empty), free("aggregationRule", Default::Empty)];
const BINDING: &[Field] = &[fixed("roleRef", Default::Empty), free("subjects", Default::Empty)];

/// All kinds that a ConfigMap may declare.
pub(crate) const KINDS: &[ManagedKind] = &[
    ManagedKind {
        group: "storage.k8s.io",
        name: "CSIDriver",
        plural: "csidrivers",
        namespaced: false,
        // While it does not exist, the kubelet applies no fsGroup to volumes without a file system type, and waits for an attachment.
        kept: true,
        within: Some("spec"),
        fields: &[
            fixed("attachRequired", Default::Bool(true)),
            fixed("volumeLifecycleModes", Default::One("Persistent")),
            free("podInfoOnMount", Default::Bool(false)),
            free("fsGroupPolicy", Default::Text("ReadWriteOnceWithFSType")),
            free("storageCapacity", Default::Bool(false)),
            free("requiresRepublish", Default::Bool(false)),
            free("seLinuxMount", Default::Bool(false)),
            free("tokenRequests", Default::Empty),
        ],
    },
    ManagedKind {
        group: "storage.k8s.io",
        name: "StorageClass",
        plural: "storageclasses",
        namespaced: false,
        kept: false,
        within: None,
        fields: &[
            fixed("provisioner", Default::Empty),
            fixed("parameters", Default::Empty),
            fixed("reclaimPolicy", Default::Text("Delete")),
            fixed("volumeBindingMode", Default::Text("Immediate")),
            free("allowVolumeExpansion", Default::Bool(false)),
            free("mountOptions", Default::Empty),
            free("allowedTopologies", Default::Empty),
        ],
    },
    ManagedKind {
        group: "scheduling.k8s.io",
        name: "PriorityClass",
        plural: "priorityclasses",
        namespaced: false,
        kept: false,
        within: None,
        fields: &[
            fixed("value", Default::Zero),
            fixed("preemptionPolicy", Default::Text("PreemptLowerPriority")),
            free("globalDefault", Default::Bool(false)),
            free("description", Default::Empty),
        ],
    },
    ManagedKind {
        group: RBAC,
        name: "ClusterRole",
        plural: "clusterroles",
        namespaced: false,
        kept: false,
        within: None,
        fields: ROLE,
    },
    ManagedKind {
        group: RBAC,
        name: "ClusterRoleBinding",
        plural: "clusterrolebindings",
        namespaced: false,
        kept: false,
        within: None,
        fields: BINDING,
    },
    ManagedKind {
        group: RBAC,
        name: "Role",
        plural: "roles",
        namespaced: true,
        kept: false,
        within: None,
        fields: ROLE,
    },
    ManagedKind {
        group: RBAC,
        name: "RoleBinding",
        plural: "rolebindings",
        namespaced: true,
        kept: false,
        within: None,
        fields: BINDING,
    },
];

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
