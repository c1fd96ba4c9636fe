//! Which nodes a storage class allows.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::StorageClass;

use crate::objects::identity::Identity;

/// A node that the driver runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) name: String,
    /// Of its Node object, and the driver's own topology label.
    pub(crate) labels: BTreeMap<String, String>,
}

/// Whether the class's `allowedTopologies` admit a node, as the scheduler reads them: one of the terms must match, and
/// of a term all; none at all admits every node, and an empty term none.
pub(crate) fn allows(class: &StorageClass, node: &Candidate) -> bool {
    let terms = class.allowed_topologies.as_deref().unwrap_or_default();
    let matches =
        |key: &str, values: &[String]| node.labels.get(key).is_some_and(|value| values.contains(value));
    terms.is_empty()
        || terms.iter().any(|term| {
            let expressions = term.match_label_expressions.as_deref().unwrap_or_default();
            !expressions.is_empty()
                && expressions.iter().all(|expression| matches(&expression.key, &expression.values))
        })
}

/// Whether volumes are made before a pod asks; what the API server takes a class without a mode for.
pub(crate) fn is_immediate(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref().is_none_or(|mode| mode == "Immediate")
}

pub(crate) fn candidate(name: &str, mut labels: BTreeMap<String, String>, identity: &Identity) -> Candidate {
    // The kubelet sets it when the driver registers, which it may be about to do again.
    labels.insert(identity.topology_key(), name.to_owned());
    Candidate { name: name.to_owned(), labels }
}
