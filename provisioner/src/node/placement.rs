//! Decides whether this node provisions for a claim.
//!
//! The scheduler has written the node into the claim. For a class with the volumeBindingMode Immediate, the controller has
//! (`controller/immediate.rs`).

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;

use crate::error::Error;
use crate::node::context::Context;
use crate::objects::ownership;
use crate::objects::refusal::Refusal;
use crate::objects::topology::{CandidateNode, allows, candidate};

/// The placement of a claim, as this node sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Placement {
    /// This node provisions.
    Here,
    /// Another node provisions, or none was selected yet.
    Elsewhere,
    /// This node was selected but may not provision, for this reason.
    Refused(Refusal),
}

/// Decides the placement of a claim. Reads this node only if the class does not allow all nodes.
///
/// # Errors
/// When this node cannot be read from the API server.
pub(crate) async fn of(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    ctx: &Context,
) -> Result<Placement, Error> {
    let identity = &ctx.cluster.identity;
    if ownership::selected_node(claim) != Some(identity.node()) {
        return Ok(Placement::Elsewhere);
    }
    let restricting =
        class.filter(|class| class.provisioner == identity.driver() && class.allowed_topologies.is_some());
    match restricting {
        Some(class) => Ok(place(class, &this_node(ctx).await?)),
        None => Ok(Placement::Here),
    }
}

/// Decides the placement of a claim for which this node was selected.
fn place(class: &StorageClass, node: &CandidateNode) -> Placement {
    if allows(class, node) {
        Placement::Here
    } else {
        Placement::Refused(Refusal::Topology { class: class.name_any(), node: node.name.clone() })
    }
}

/// Returns this node with the labels that `allowedTopologies` selects by.
///
/// # Errors
/// When the node cannot be read from the API server.
pub(crate) async fn this_node(ctx: &Context) -> Result<CandidateNode, Error> {
    let name = ctx.cluster.identity.node();
    let labels = ctx.cluster.read_node(name).await?.and_then(|node| node.labels).unwrap_or_default();
    Ok(candidate(name, labels, &ctx.cluster.identity))
}

#[cfg(test)]
mod tests {
    use http::Method;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{TestContext, expect};

    fn only(node: &str) -> Value {
        let key = "topology.csi.loopfs.dev/node";
        json!({"allowedTopologies": [{"matchLabelExpressions": [{"key": key, "values": [node]}]}]})
    }

    #[rstest]
    #[case::selected(Some("node-a"), Some(json!({})), false, Placement::Here)]
    #[case::selected_by_the_controller(Some("node-a"), Some(json!({"volumeBindingMode": "Immediate"})), false, Placement::Here)]
    #[case::without_a_known_class(Some("node-a"), None, false, Placement::Here)]
    #[case::selected_elsewhere(Some("node-b"), Some(only("node-a")), false, Placement::Elsewhere)]
    #[case::not_selected(None, Some(json!({"volumeBindingMode": "Immediate"})), false, Placement::Elsewhere)]
    #[case::another_driver(Some("node-a"), Some(json!({"provisioner": "x", "allowedTopologies": []})), false, Placement::Here)]
    #[case::selected_and_allowed(Some("node-a"), Some(only("node-a")), true, Placement::Here)]
    #[case::not_allowed(Some("node-a"), Some(only("node-c")), true, Placement::Refused(Refusal::Topology { class: "loopfs".to_owned(), node: "node-a".to_owned() }))]
    #[tokio::test]
    async fn places(
        #[case] selected: Option<&str>,
        #[case] class: Option<Value>,
        #[case] reads_node: bool,
        #[case] expected: Placement,
    ) {
        let node = fixtures::metadata_only(json!({"name": "node-a"}));
        let read = reads_node.then(|| expect(Method::GET, "/api/v1/nodes/node-a", None).respond(node));
        let test_context = TestContext::new(read.into_iter().collect());
        let claim =
            fixtures::claim(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: selected}}}));
        let class = class.map(fixtures::class);
        let placed = of(&claim, class.as_ref(), &test_context.ctx).await.unwrap();
        assert_eq!(placed, expected);
        test_context.finish().await;
    }
}
