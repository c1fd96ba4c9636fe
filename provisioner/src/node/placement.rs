//! Decides which node provisions for a claim. Every node decides for itself, and all reach the same result.
//!
//! For a class with WaitForFirstConsumer the scheduler has chosen. For a class with Immediate no component has chosen, and the pod
//! is unknown: any choice among several nodes would be a guess that binds the pod. So exactly one node must be allowed, by the
//! class's `allowedTopologies` or because the driver runs on no other node.

use k8s_openapi::api::{
    core::v1::{Node, PersistentVolumeClaim},
    storage::v1::{CSINode, StorageClass},
};
use kube::{Api, ResourceExt, api::ListParams};

use crate::{
    api::absence,
    error::Error,
    node::context::Context,
    objects::{
        identity::Identity,
        ownership,
        refusal::Refusal,
        topology::{Candidate, allows, candidate, is_immediate},
    },
};

/// The placement of a claim, as this node sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Placement {
    /// This node provisions.
    Here,
    /// Another node provisions, or the scheduler has not chosen yet.
    Elsewhere,
    /// No node may provision, for this reason; this node reports it.
    Refused(Refusal),
    /// No node may provision now, or another one does. Nodes are added and deleted, so this node checks again later.
    Requeue,
}

/// The nodes that the decision requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequiredNodes {
    Nothing,
    ThisNode,
    AllNodes,
}

fn required_nodes(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    identity: &Identity,
) -> RequiredNodes {
    let Some(class) = class.filter(|class| class.provisioner == identity.driver()) else {
        return RequiredNodes::Nothing;
    };
    match ownership::selected_node(claim) {
        Some(node) if node == identity.node() && class.allowed_topologies.is_some() => {
            RequiredNodes::ThisNode
        }
        None if is_immediate(class) => RequiredNodes::AllNodes,
        _ => RequiredNodes::Nothing,
    }
}

/// Decides the placement of a claim, given the nodes that [`required_nodes`] returned.
fn place(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    nodes: &[Candidate],
    identity: &Identity,
) -> Placement {
    let is_this = |node: &Candidate| node.name == identity.node();
    let Some(node) = ownership::selected_node(claim) else {
        return match class {
            Some(class) if class.provisioner == identity.driver() && is_immediate(class) => {
                only_one(class, nodes, identity)
            }
            // The scheduler has to choose, or the class does not exist yet.
            _ => Placement::Elsewhere,
        };
    };
    if node != identity.node() {
        return Placement::Elsewhere;
    }
    let refusing =
        class.filter(|class| !nodes.iter().filter(|node| is_this(node)).all(|node| allows(class, node)));
    match refusing {
        Some(class) => {
            Placement::Refused(Refusal::Topology { class: class.name_any(), node: node.to_owned() })
        }
        None => Placement::Here,
    }
}

fn only_one(class: &StorageClass, nodes: &[Candidate], identity: &Identity) -> Placement {
    let allowed: Vec<&Candidate> = nodes.iter().filter(|node| allows(class, node)).collect();
    if let [only] = allowed.as_slice() {
        return if only.name == identity.node() { Placement::Here } else { Placement::Requeue };
    }
    let reporting = if allowed.is_empty() { nodes.iter().collect() } else { allowed.clone() };
    if reporting.iter().map(|node| node.name.as_str()).min() != Some(identity.node()) {
        return Placement::Requeue;
    }
    Placement::Refused(Refusal::Immediate { class: class.name_any(), nodes: allowed.len() })
}

/// Decides the placement of a claim, after reading the required nodes.
///
/// # Errors
/// When the nodes cannot be read from the API server.
pub(crate) async fn of(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    ctx: &Context,
) -> Result<Placement, Error> {
    let nodes = match required_nodes(claim, class, &ctx.cluster.identity) {
        RequiredNodes::Nothing => vec![],
        RequiredNodes::ThisNode => vec![this_node(ctx).await?],
        RequiredNodes::AllNodes => all_nodes(ctx).await?,
    };
    Ok(place(claim, class, &nodes, &ctx.cluster.identity))
}

/// Returns this node with the labels that `allowedTopologies` selects by.
///
/// # Errors
/// When the node cannot be read from the API server.
pub(crate) async fn this_node(ctx: &Context) -> Result<Candidate, Error> {
    let name = ctx.cluster.identity.node();
    let nodes: Api<Node> = Api::all(ctx.cluster.client.clone());
    let node = absence::get_metadata_opt(&nodes, name).await;
    let node = node.map_err(|error| Error::api("read Node", name, error))?;
    let labels = node.and_then(|node| node.metadata.labels).unwrap_or_default();
    Ok(candidate(name, labels, &ctx.cluster.identity))
}

/// Returns all nodes of the driver. Needed only for a claim without a selected node. The nodes are not watched: in a large cluster
/// they are written all the time, and every node would receive the events of all others.
async fn all_nodes(ctx: &Context) -> Result<Vec<Candidate>, Error> {
    // From the API server's cache: as current as a watch, and no load on etcd.
    let cached = ListParams::default().match_any();
    let registered: Api<CSINode> = Api::all(ctx.cluster.client.clone());
    let registered = registered.list(&cached).await;
    let registered = registered.map_err(|error| Error::api("list", "the CSINodes", error))?;
    let nodes: Api<Node> = Api::all(ctx.cluster.client.clone());
    let nodes = nodes.list_metadata(&cached).await.map_err(|error| Error::api("list", "the Nodes", error))?;
    let runs_driver = |name: &str| {
        let drivers =
            registered.iter().filter(|node| node.name_any() == name).flat_map(|node| &node.spec.drivers);
        drivers.into_iter().any(|driver| driver.name == ctx.cluster.identity.driver())
    };
    let nodes =
        nodes.items.into_iter().map(|node| (node.name_any(), node.metadata.labels.unwrap_or_default()));
    let nodes = nodes.filter(|(name, _)| runs_driver(name));
    Ok(nodes.map(|(name, labels)| candidate(&name, labels, &ctx.cluster.identity)).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    fn node(name: &str) -> Candidate {
        let zone = if name == "node-c" { "east" } else { "west" };
        candidate(name, BTreeMap::from([("zone".to_owned(), zone.to_owned())]), &fixtures::identity())
    }

    fn topologies(terms: Value) -> Value {
        json!({"volumeBindingMode": "Immediate", "allowedTopologies": terms})
    }

    fn only(node: &str) -> Value {
        let key = "topology.csi.loopfs.dev/node";
        topologies(json!([{"matchLabelExpressions": [{"key": key, "values": [node]}]}]))
    }

    const SELECTED: &str = "volume.kubernetes.io/selected-node";

    fn placed(selected: Option<&str>, class: Value, nodes: &[&str]) -> Placement {
        let claim = fixtures::claim(json!({"metadata": {"annotations": {SELECTED: selected}}}));
        let nodes: Vec<_> = nodes.iter().map(|name| node(name)).collect();
        place(&claim, Some(&fixtures::class(class)), &nodes, &fixtures::identity())
    }

    #[rstest]
    #[case::selected(Some("node-a"), json!({}), &[], Placement::Here)]
    #[case::selected_though_immediate(Some("node-a"), json!({"volumeBindingMode": "Immediate"}), &[], Placement::Here)]
    #[case::selected_elsewhere(Some("node-b"), json!({}), &[], Placement::Elsewhere)]
    #[case::selected_and_allowed(Some("node-a"), only("node-a"), &["node-a"], Placement::Here)]
    #[case::the_schedulers_turn(None, json!({}), &["node-a"], Placement::Elsewhere)]
    #[case::another_driver(None, json!({"volumeBindingMode": "Immediate", "provisioner": "x"}), &["node-a"], Placement::Elsewhere)]
    #[case::the_only_node(None, json!({"volumeBindingMode": "Immediate"}), &["node-a"], Placement::Here)]
    #[case::no_mode_is_immediate(None, json!({"volumeBindingMode": null}), &["node-a"], Placement::Here)]
    #[case::another_only_node(None, json!({"volumeBindingMode": "Immediate"}), &["node-b"], Placement::Requeue)]
    #[case::the_class_names_it(None, only("node-a"), &["node-a", "node-b"], Placement::Here)]
    #[case::the_class_names_another(None, only("node-b"), &["node-a", "node-b"], Placement::Requeue)]
    #[case::another_node_reports(None, topologies(json!([{"matchLabelExpressions": [{"key": "zone", "values": ["none"]}]}])), &["node-0", "node-a"], Placement::Requeue)]
    #[case::driver_on_no_node(None, json!({"volumeBindingMode": "Immediate"}), &[], Placement::Requeue)]
    fn places(
        #[case] selected: Option<&str>,
        #[case] class: Value,
        #[case] nodes: &[&str],
        #[case] expected: Placement,
    ) {
        assert_eq!(placed(selected, class, nodes), expected);
    }

    #[rstest]
    #[case::too_many(None, json!({"volumeBindingMode": "Immediate"}), &["node-b", "node-a"], "2 nodes may")]
    #[case::none(None, only("node-c"), &["node-b", "node-a"], "no node may")]
    #[case::not_this_one(Some("node-a"), only("node-c"), &["node-a"], "do not allow node \"node-a\"")]
    fn refusals_name_the_remedy(
        #[case] selected: Option<&str>,
        #[case] class: Value,
        #[case] nodes: &[&str],
        #[case] expected: &str,
    ) {
        match placed(selected, class, nodes) {
            Placement::Refused(why) => {
                let why = why.to_string();
                assert!(why.contains(expected) && why.contains("allowedTopologies"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }

    /// For all classes and all sets of nodes, at most one node provisions, and at most one reports a refusal.
    #[test]
    fn at_most_one_node_provisions_and_at_most_one_reports() {
        let zone = |values: &[&str]| {
            topologies(json!([{"matchLabelExpressions": [{"key": "zone", "values": values}]}]))
        };
        let classes =
            [zone(&["west"]), zone(&["east"]), zone(&["east", "west"]), zone(&["north"]), only("node-b")];
        let all = ["node-a", "node-b", "node-c"];
        let claim = fixtures::claim(json!({"metadata": {"annotations": {SELECTED: null}}}));
        for class in classes {
            let class = fixtures::class(class);
            for running in 0..1 << all.len() {
                let nodes: Vec<_> = all
                    .iter()
                    .enumerate()
                    .filter(|(bit, _)| running >> bit & 1 == 1)
                    .map(|(_, name)| node(name))
                    .collect();
                let placements: Vec<_> = nodes
                    .iter()
                    .map(|node| {
                        let identity = Identity::new("csi.loopfs.dev", &node.name).unwrap();
                        place(&claim, Some(&class), &nodes, &identity)
                    })
                    .collect();
                let count = |matches: fn(&Placement) -> bool| {
                    placements.iter().filter(|place| matches(place)).count()
                };
                let (here, refused) = (
                    count(|place| *place == Placement::Here),
                    count(|place| matches!(place, Placement::Refused(_))),
                );
                assert_eq!(here + refused, usize::from(!nodes.is_empty()), "{nodes:?} {placements:?}");
            }
        }
    }

    #[rstest]
    #[case::no_terms(json!([]), true)]
    #[case::absent(Value::Null, true)]
    #[case::an_empty_term(json!([{}]), false)]
    #[case::one_of_two_terms(json!([{"matchLabelExpressions": [{"key": "zone", "values": ["east"]}]}, {"matchLabelExpressions": [{"key": "zone", "values": ["west"]}]}]), true)]
    #[case::half_a_term(json!([{"matchLabelExpressions": [{"key": "zone", "values": ["west"]}, {"key": "rack", "values": ["1"]}]}]), false)]
    fn topologies_are_evaluated_as_by_the_scheduler(#[case] terms: Value, #[case] expected: bool) {
        assert_eq!(allows(&fixtures::class(topologies(terms)), &node("node-a")), expected);
    }
}
