//! StorageClasses with the volumeBindingMode Immediate, each of which leaves the same node.

use anyhow::{Context, Result};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};
use testvm_cluster::api_error::api_error;

use super::super::measured_process::DRIVER;

/// The way in which the allowed topology of a class leaves one node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Topology {
    /// By the topology key of the driver, whose value is the name of the node.
    Name,
    /// By a label that only that Node has.
    Label,
    /// By the topology key of the driver, and by a label that all Nodes have.
    NameAndLabel,
}

impl Topology {
    pub(super) const ALL: [Topology; 3] = [Topology::Name, Topology::Label, Topology::NameAndLabel];

    /// Returns the beginning of the names of its rows.
    pub(super) const fn row(self) -> &'static str {
        match self {
            Topology::Name => "placement",
            Topology::Label => "placement_by_label",
            Topology::NameAndLabel => "placement_by_name_and_label",
        }
    }

    /// Returns the name of its class.
    pub(super) const fn class(self) -> &'static str {
        match self {
            Topology::Name => "immediate-by-name",
            Topology::Label => "immediate-by-label",
            Topology::NameAndLabel => "immediate-by-name-and-label",
        }
    }

    /// Returns how texts describe the allowed topology of its class.
    pub(super) const fn description(self) -> &'static str {
        match self {
            Topology::Name => "the name of a node",
            Topology::Label => "a label of a node",
            Topology::NameAndLabel => "the name of a node and a label of all nodes",
        }
    }

    fn expressions(self, node: &str) -> Vec<Value> {
        let name = json!({"key": format!("topology.{DRIVER}/node"), "values": [node]});
        match self {
            Topology::Name => vec![name],
            Topology::Label => vec![json!({"key": "kubernetes.io/hostname", "values": [node]})],
            Topology::NameAndLabel => vec![name, json!({"key": "kubernetes.io/os", "values": ["linux"]})],
        }
    }
}

/// Creates the class of each topology, which leaves `node`.
pub(super) async fn create(client: &Client, node: &str) -> Result<()> {
    let classes: Api<StorageClass> = Api::all(client.clone());
    for topology in Topology::ALL {
        let created = classes.create(&PostParams::default(), &class(topology, node)?).await;
        created.map_err(api_error).with_context(|| format!("create StorageClass {}", topology.class()))?;
    }
    Ok(())
}

fn class(topology: Topology, node: &str) -> Result<StorageClass> {
    let class = json!({
        "metadata": {"name": topology.class()},
        "provisioner": DRIVER,
        "volumeBindingMode": "Immediate",
        "allowedTopologies": [{"matchLabelExpressions": topology.expressions(node)}],
    });
    serde_json::from_value(class).context("create a StorageClass from JSON")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::name(Topology::Name, &["topology.csi.loopfs.dev/node"])]
    #[case::label(Topology::Label, &["kubernetes.io/hostname"])]
    #[case::both(Topology::NameAndLabel, &["topology.csi.loopfs.dev/node", "kubernetes.io/os"])]
    fn a_class_allows_one_topology(#[case] topology: Topology, #[case] expected: &[&str]) {
        let class = class(topology, "node-b").unwrap();
        assert_eq!(class.volume_binding_mode.as_deref(), Some("Immediate"));
        let [term] = class.allowed_topologies.unwrap().try_into().unwrap();
        let expressions = term.match_label_expressions.unwrap();
        let keys: Vec<_> = expressions.iter().map(|expression| expression.key.as_str()).collect();
        assert_eq!(keys, expected);
    }
}
