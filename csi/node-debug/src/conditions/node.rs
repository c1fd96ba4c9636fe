//! The objects of this node on the API server.

use std::sync::Arc;

use anyhow::{Context, ensure};
use csi::DriverName;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::CSINode;
use kube::Client;
use tokio::sync::Mutex;

use crate::cluster::ApiServerAccess;

/// A query about this node.
#[derive(Clone)]
pub(super) struct NodeQuery {
    pub(super) cluster: ApiServerAccess,
    /// The client of the wait.
    pub(super) client: Arc<Mutex<Option<Client>>>,
    pub(super) name: String,
}

impl NodeQuery {
    pub(super) async fn ready(&self) -> anyhow::Result<String> {
        is_ready(&self.name, self.cluster.object(&self.client, &self.name).await?)
    }

    pub(super) async fn has_driver(&self, driver: &DriverName) -> anyhow::Result<String> {
        has_driver(&self.name, driver, self.cluster.object(&self.client, &self.name).await?)
    }
}

fn is_ready(name: &str, node: Option<Node>) -> anyhow::Result<String> {
    let node =
        node.with_context(|| format!("Node {name} does not exist; the kubelet has not registered it"))?;
    let conditions = node.status.and_then(|status| status.conditions);
    let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
    let ready = ready.with_context(|| format!("Node {name} has no condition Ready yet"))?;
    ensure!(
        ready.status == "True",
        "Node {name} is not Ready: {} {}",
        ready.reason.as_deref().unwrap_or("no reason"),
        ready.message.as_deref().unwrap_or_default()
    );
    Ok(format!("Node {name} is Ready"))
}

fn has_driver(name: &str, driver: &DriverName, node: Option<CSINode>) -> anyhow::Result<String> {
    let drivers = node.into_iter().flat_map(|node| node.spec.drivers).map(|driver| driver.name);
    let drivers: Vec<String> = drivers.collect();
    ensure!(
        drivers.iter().any(|found| found == driver.as_str()),
        "the driver serves its socket, but the drivers that CSINode {name} lists are {drivers:?}; see the log of the kubelet"
    );
    Ok(format!("CSINode {name} lists driver {driver}"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn node(conditions: Value) -> Node {
        serde_json::from_value(json!({ "metadata": {}, "status": { "conditions": conditions } })).unwrap()
    }

    #[rstest]
    #[case::ready(Some(json!([{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}])), true)]
    #[case::not_ready(Some(json!([{"type": "Ready", "status": "False", "reason": "NoCni"}])), false)]
    #[case::unknown(Some(json!([{"type": "Ready", "status": "Unknown"}])), false)]
    #[case::no_condition(Some(json!([])), false)]
    #[case::no_object(None, false)]
    fn only_true_condition_makes_node_ready(#[case] conditions: Option<Value>, #[case] met: bool) {
        let ready = is_ready("n", conditions.map(node));
        assert_eq!(ready.is_ok(), met, "{ready:?}");
    }

    #[rstest]
    #[case::listed(Some(&["other", "a.b"] as &[_]), true)]
    #[case::others(Some(&["other"] as &[_]), false)]
    #[case::no_object(None, false)]
    fn driver_in_csi_node_is_registered(#[case] drivers: Option<&[&str]>, #[case] met: bool) {
        let csi_node = drivers.map(|drivers| {
            let drivers: Vec<Value> = drivers
                .iter()
                .map(|name| json!({ "name": name, "nodeID": "n", "topologyKeys": [] }))
                .collect();
            serde_json::from_value(json!({ "metadata": {}, "spec": { "drivers": drivers } })).unwrap()
        });
        let registered = has_driver("n", &"a.b".parse().unwrap(), csi_node);
        assert_eq!(registered.is_ok(), met, "{registered:?}");
    }
}
