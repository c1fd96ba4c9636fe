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

/// Returns `true` if this node provisions for a claim, and `false` if another node does or none was selected yet. Reads this node only if
/// the class does not allow all nodes.
///
/// # Errors
/// When this node was selected and the class does not allow it, or when this node cannot be read from the API server.
pub(crate) async fn is_here(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    ctx: &Context,
) -> Result<bool, Error> {
    let identity = &ctx.cluster.identity;
    if ownership::selected_node(claim) != Some(identity.node()) {
        return Ok(false);
    }
    let restricting =
        class.filter(|class| class.provisioner == identity.driver() && class.allowed_topologies.is_some());
    let Some(class) = restricting else { return Ok(true) };
    let node = this_node(ctx).await?;
    if !allows(class, &node) {
        return Err(Refusal::Topology { class: class.name_any(), node: node.name }.into());
    }
    Ok(true)
}

/// Returns this node with the labels that `allowedTopologies` selects by.
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
    #[case::selected(Some("node-a"), Some(json!({})), false, Some(true))]
    #[case::selected_by_the_controller(Some("node-a"), Some(json!({"volumeBindingMode": "Immediate"})), false, Some(true))]
    #[case::without_a_known_class(Some("node-a"), None, false, Some(true))]
    #[case::selected_elsewhere(Some("node-b"), Some(only("node-a")), false, Some(false))]
    #[case::not_selected(None, Some(json!({"volumeBindingMode": "Immediate"})), false, Some(false))]
    #[case::another_driver(Some("node-a"), Some(json!({"provisioner": "x", "allowedTopologies": []})), false, Some(true))]
    #[case::selected_and_allowed(Some("node-a"), Some(only("node-a")), true, Some(true))]
    #[case::not_allowed(Some("node-a"), Some(only("node-c")), true, None)]
    #[tokio::test]
    async fn places(
        #[case] selected: Option<&str>,
        #[case] class: Option<Value>,
        #[case] reads_node: bool,
        #[case] expected: Option<bool>,
    ) {
        let node = fixtures::metadata_only(json!({"name": "node-a"}));
        let read = reads_node.then(|| expect(Method::GET, "/api/v1/nodes/node-a", None).respond(node));
        let test_context = TestContext::new(read.into_iter().collect());
        let claim =
            fixtures::claim(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: selected}}}));
        let class = class.map(fixtures::class);
        match is_here(&claim, class.as_ref(), &test_context.ctx).await {
            Ok(is_here) => assert_eq!(Some(is_here), expected),
            Err(error) => assert!(expected.is_none() && error.reason() == "Refused", "{error}"),
        }
        test_context.finish().await;
    }
}
