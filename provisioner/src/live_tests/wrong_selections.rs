//! Tests of claims that name a node which cannot serve them.

use super::controllers::ONLY_PLACEMENT;
use super::*;
use crate::objects::ownership::{SELECTED_NODE, selected_node};

#[tokio::test]
async fn deleted_nodes_claim_is_provisioned_elsewhere() {
    let cluster = TestCluster::connect().await;
    let running = [cluster.provisioner().await, cluster.controller(ONLY_PLACEMENT).await];
    let deleted = json!({"metadata": {"annotations": {SELECTED_NODE: "node-that-was-deleted"}}});
    cluster.claim("data", deleted).await;
    cluster.event_that("data", "SelectedNodeRemoved", "was deleted from the cluster").await;
    until(&cluster.claims(), "data", |claim| selected_node(claim).is_none()).await;
    // The scheduler selects again.
    cluster.select("data", HERE).await;
    cluster.bound("data").await;
    cluster.delete_claims(&["data"]).await;
    cluster.finish(running).await;
}

/// The disk was moved here from another node, and an administrator created the PersistentVolume again.
#[tokio::test]
async fn claim_with_moved_volume_is_expanded() {
    let cluster = TestCluster::connect().await;
    let running = [cluster.provisioner().await, cluster.controller(ONLY_PLACEMENT).await];
    cluster.claim("data", json!({})).await;
    cluster.bound("data").await;
    cluster.select("data", THERE).await;
    cluster.expand("data", "2Mi").await;
    cluster.delete_claims(&["data"]).await;
    cluster.finish(running).await;
}
