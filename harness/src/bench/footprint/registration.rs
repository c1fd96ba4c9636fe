//! The time from the start of the driver until the kubelet has registered it, which is when pods can use volumes.
//!
//! The driver runs on the node beside the pods, with a name of its own.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::storage::v1::CSINode;
use kube::{Api, Client};
use testvm_cluster::waiting::{State, until_one};
use testvm_cluster::{KUBELET_ROOT, Node};

use super::super::measurement::milliseconds;
use super::super::node_process::NodeProcess;
use super::super::provision::peer::DRIVER;
use crate::nodes::DATA_DIR;

/// The name of the driver, which no other driver on the node has.
const NAME: &str = "footprint.loopfs.dev";
/// The directory of the socket and the logs on the node.
const DIR: &str = "/run/footprint";

/// The timeout until the kubelet has registered a driver, or removed it.
const TIMEOUT: Duration = Duration::from_secs(180);
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Starts and stops the driver `rounds` times. Returns the milliseconds of each start.
pub(super) async fn measure(client: &Client, node: &Node, rounds: usize) -> Result<Vec<f64>> {
    node.output(&["mkdir", "-p", DIR], COMMAND_TIMEOUT).await?;
    let args = driver_args(node.name());
    let mut starts = Vec::new();
    for _ in 0..rounds {
        let begun = Instant::now();
        let registered = until_listed(client, node, true);
        let (driver, ()) = tokio::try_join!(NodeProcess::start(node, DIR, DRIVER, &args), registered)?;
        starts.push(milliseconds(begun.elapsed()));
        driver.terminate().await?;
        until_listed(client, node, false).await?;
    }
    Ok(starts)
}

/// Waits until the node's CSINode object lists the driver, or until it does not.
async fn until_listed(client: &Client, node: &Node, is_listed: bool) -> Result<()> {
    let nodes: Api<CSINode> = Api::all(client.clone());
    until_one(nodes, node.name(), TIMEOUT, |object| {
        let listed = object.is_some_and(|object| lists(object, NAME));
        State::ready_if(listed == is_listed, format!("driver {NAME} is listed: {listed}"))
    })
    .await
    .with_context(|| format!("CSINode {}", node.name()))
    .map(drop)
}

fn lists(object: &CSINode, driver: &str) -> bool {
    object.spec.drivers.iter().any(|listed| listed.name == driver)
}

fn driver_args(node: &str) -> [String; 6] {
    let socket = format!("{DIR}/{NAME}.sock");
    [
        format!("--driver-name={NAME}"),
        format!("--node-name={node}"),
        format!("--data-dir={DATA_DIR}"),
        format!("--endpoint=unix://{socket}"),
        format!("--registration-dir={KUBELET_ROOT}/plugins_registry"),
        format!("--kubelet-csi-socket={socket}"),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_csinode_lists_a_driver_by_its_whole_name() {
        let object: CSINode = serde_json::from_value(json!({
            "metadata": {"name": "node-0"}, "spec": {"drivers": [{"name": NAME, "nodeID": "node-0"}]},
        }))
        .unwrap();
        assert!(lists(&object, NAME) && !lists(&object, "footprint"));
    }
}
