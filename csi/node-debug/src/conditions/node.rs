//! The objects of this node on the API server.

use csi::DriverName;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::CSINode;

use super::evaluation::Evaluation;
use crate::cluster::ApiServerAccess;

/// A query about this node.
#[derive(Clone, Debug)]
pub(super) struct NodeQuery {
    pub(super) cluster: ApiServerAccess,
    pub(super) name: String,
}

impl NodeQuery {
    pub(super) async fn ready(&self) -> anyhow::Result<Evaluation> {
        Ok(is_ready(&self.name, self.cluster.node(&self.name).await?.as_ref()))
    }

    pub(super) async fn has_driver(&self, driver: &DriverName) -> anyhow::Result<Evaluation> {
        Ok(has_driver(&self.name, driver, self.cluster.csi_node(&self.name).await?.as_ref()))
    }
}

fn is_ready(name: &str, node: Option<&Node>) -> Evaluation {
    let Some(node) = node else {
        return Evaluation::not_met(format!("Node {name} does not exist; the kubelet has not registered it"));
    };
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
    match ready {
        Some(ready) if ready.status == "True" => Evaluation::met(format!("Node {name} is Ready")),
        Some(ready) => Evaluation::not_met(format!(
            "Node {name} is not Ready: {} {}",
            ready.reason.as_deref().unwrap_or("no reason"),
            ready.message.as_deref().unwrap_or_default()
        )),
        None => Evaluation::not_met(format!("Node {name} has no condition Ready yet")),
    }
}

fn has_driver(name: &str, driver: &DriverName, node: Option<&CSINode>) -> Evaluation {
    let drivers = node.iter().flat_map(|node| &node.spec.drivers).map(|driver| driver.name.as_str());
    let drivers: Vec<&str> = drivers.collect();
    if drivers.contains(&driver.as_str()) {
        return Evaluation::met(format!("CSINode {name} lists driver {driver}"));
    }
    let listed = if drivers.is_empty() { "no driver".to_owned() } else { drivers.join(", ") };
    Evaluation::not_met(format!(
        "the driver serves its socket, but CSINode {name} lists {listed}; see the log of the kubelet"
    ))
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
        let evaluation = is_ready("n", conditions.map(node).as_ref());
        assert_eq!(evaluation.met, met, "{}", evaluation.detail);
        assert!(evaluation.detail.contains("Node n"));
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
        let evaluation = has_driver("n", &"a.b".parse().unwrap(), csi_node.as_ref());
        assert_eq!(evaluation.met, met, "{}", evaluation.detail);
    }
}
