//! Nodes of the driver that are objects only.

use anyhow::{Context, Result};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;
use testvm::progress::Step;
use testvm_cluster::api_error::api_error;

use super::super::super::cluster::CLASS;
use super::super::measured_process::DRIVER;
use super::super::numbered;
use crate::fake_nodes::{self, NODES, SYSTEM};
use crate::test_env::claim_labels::LABEL;

/// The nodes of the cluster: those on which the driver is installed, and the declared ones.
pub(super) struct DeclaredNodes {
    client: Client,
    /// The number of nodes that exist.
    existing: u64,
}

impl DeclaredNodes {
    pub(super) fn new(client: &Client) -> DeclaredNodes {
        DeclaredNodes { client: client.clone(), existing: NODES.len() as u64 }
    }

    /// Declares nodes until there are `count`.
    pub(super) async fn declare_up_to(&mut self, count: u64, step: &Step) -> Result<()> {
        let declare = |number| declare(&self.client, number);
        self.existing = numbered::create(self.existing..count, "nodes", step, declare).await?;
        Ok(())
    }
}

/// Creates the objects of a node: those that its kubelet publishes, and the free capacity that its provisioner publishes.
async fn declare(client: &Client, number: u64) -> Result<()> {
    let node = format!("declared-{number:05}");
    fake_nodes::register(client, &node, DRIVER).await.with_context(|| format!("declare node {node}"))?;
    let capacities: Api<CSIStorageCapacity> = Api::namespaced(client.clone(), SYSTEM);
    let created = capacities.create(&PostParams::default(), &capacity(&node, number)?).await;
    created.map_err(api_error).with_context(|| format!("create the CSIStorageCapacity of {node}")).map(drop)
}

/// Returns the free capacity of a node for the class of the manifests. No pod owns the object, because there is none on the node.
fn capacity(node: &str, number: u64) -> Result<CSIStorageCapacity> {
    let capacity = json!({
        "metadata": {
            // The provisioner appends a hash of this length.
            "name": format!("{node}-{number:016x}"),
            "labels": {
                "csi.storage.k8s.io/drivername": DRIVER,
                "csi.storage.k8s.io/managed-by": "loopfs-provisioner",
                LABEL: node,
            },
        },
        "storageClassName": CLASS,
        "nodeTopology": {"matchLabels": {format!("topology.{DRIVER}/node"): node}},
        "capacity": "100Gi",
        "maximumVolumeSize": "100Gi",
    });
    serde_json::from_value(capacity).context("create a CSIStorageCapacity from JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capacity_of_a_node_has_its_name() {
        let capacity = capacity("declared-00007", 7).unwrap();
        assert_eq!(capacity.metadata.name.as_deref(), Some("declared-00007-0000000000000007"));
        let topology = capacity.node_topology.unwrap().match_labels.unwrap();
        assert_eq!(topology["topology.csi.loopfs.dev/node"], "declared-00007");
    }
}
