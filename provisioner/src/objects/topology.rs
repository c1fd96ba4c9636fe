//! Decides which nodes a storage class allows.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::StorageClass;

use crate::objects::identity::Identity;

/// A node that the driver runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CandidateNode {
    pub(crate) name: String,
    /// The labels of its Node object, and the driver's own topology label.
    pub(crate) labels: BTreeMap<String, String>,
}

/// Returns `true` if the class's `allowedTopologies` allow a node, as the scheduler evaluates them: all expressions of at least one
/// term must match. Without terms every node is allowed, and an empty term matches no node.
pub(crate) fn allows(class: &StorageClass, node: &CandidateNode) -> bool {
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

/// Returns `true` if volumes of the class are created before a pod uses the claim, which is also the default of the API server.
pub(crate) fn is_immediate(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref().is_none_or(|mode| mode == "Immediate")
}

pub(crate) fn candidate(
    name: &str,
    mut labels: BTreeMap<String, String>,
    identity: &Identity,
) -> CandidateNode {
    // The kubelet sets this label when the driver registers, which may be in progress.
    labels.insert(identity.topology_key(), name.to_owned());
    CandidateNode { name: name.to_owned(), labels }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    #[rstest]
    #[case::no_terms(json!([]), true)]
    #[case::absent(Value::Null, true)]
    #[case::an_empty_term(json!([{}]), false)]
    #[case::one_of_two_terms(json!([{"matchLabelExpressions": [{"key": "zone", "values": ["east"]}]}, {"matchLabelExpressions": [{"key": "zone", "values": ["west"]}]}]), true)]
    #[case::half_a_term(json!([{"matchLabelExpressions": [{"key": "zone", "values": ["west"]}, {"key": "rack", "values": ["1"]}]}]), false)]
    fn topologies_match_as_in_scheduler(#[case] terms: Value, #[case] expected: bool) {
        let labels = BTreeMap::from([("zone".to_owned(), "west".to_owned())]);
        let node = candidate("node-a", labels, &fixtures::identity());
        assert_eq!(allows(&fixtures::class(json!({"allowedTopologies": terms})), &node), expected);
    }
}
