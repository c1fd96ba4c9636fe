//! A second node joins, first without storage and then with it, takes what the first one has no space for, and leaves.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt};

use super::{full_node, install, node_without_storage};
use crate::cluster::api_error::told;
use crate::cluster::{DataDisk, Node};
use crate::e2e::story::{Story, Told};
use crate::test_env::env::{FOREIGN_NODE, World};

pub(in crate::e2e) const NAME: &str = "second node";

const INDEX: u8 = 1;

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    let (Some(cluster), Some(first)) = (world.cluster, world.node) else {
        story.skip("boot a second node", FOREIGN_NODE);
        return Ok(());
    };
    let booted = cluster.boot_node(story.session(), INDEX, DataDisk::Unmounted);
    let second = story.step("boot a second node without a data file system", booted).await?;
    node_without_storage::tell(story, world, &second).await?;
    full_node::tell(story, world, first, &second).await?;
    story.step("the second node leaves", leave(world, second)).await
}

/// Removes the node as an administrator does, with the objects of the pods that ran there: no kubelet reports their end.
async fn leave(world: &World<'_>, node: Node) -> Result<()> {
    let name = node.name().to_owned();
    node.stop().await?;
    let nodes: Api<NodeObject> = Api::all(world.client.clone());
    nodes.delete(&name, &DeleteParams::default()).await.map_err(told).context("delete the Node")?;
    for pod in world.live_driver_pods().await? {
        if pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&name) {
            let forced = DeleteParams::default().grace_period(0);
            let deleted = world.driver_pods().delete(&pod.name_any(), &forced).await;
            deleted.map_err(told).context("delete the driver's pod")?;
        }
    }
    install::serves(world, 1).await
}
