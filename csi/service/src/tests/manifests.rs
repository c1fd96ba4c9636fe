//! Tests of the component `csi/deploy/monitoring`.

use serde_json::{Value, json};

use super::yaml;

const POD_MONITOR: &str = include_str!("../../../deploy/monitoring/podmonitor.yaml");
const NETWORK_POLICY: &str = include_str!("../../../deploy/monitoring/networkpolicy.yaml");
const DAEMON_SET: &str = include_str!("../../../deploy/daemonset.yaml");
const CONTROLLER: &str = include_str!("../../../deploy/controller.yaml");

/// The value of the label `job` that the alert rules and the dashboard select by.
const JOB: &str = "loopfs";
/// The label of pods by which the component selects them.
const NAME: &str = "app.kubernetes.io/name";

/// Returns the templates of the driver's pods: those of the DaemonSet, and those of the Deployment of the controller.
fn pod_templates() -> [Value; 2] {
    // The file of the controller begins with its account and its roles.
    let (_, deployment) = CONTROLLER.rsplit_once("\n---\n").unwrap();
    [DAEMON_SET, deployment].map(|manifest| yaml(manifest)["spec"]["template"].clone())
}

/// Returns the ports of a pod that serve metrics.
fn metrics_ports(template: &Value) -> Vec<Value> {
    let containers = template["spec"]["containers"].as_array().unwrap();
    let ports = containers.iter().flat_map(|container| container["ports"].as_array().unwrap().clone());
    let names = ports.map(|port| port["name"].clone());
    names.filter(|name| name.as_str().unwrap().ends_with("-metrics")).collect()
}

fn all_metrics_ports() -> Vec<Value> {
    pod_templates().iter().flat_map(metrics_ports).collect()
}

/// Returns the selector that selects the pods of the DaemonSet and those of the Deployment.
fn selector() -> Value {
    let names = pod_templates().map(|template| template["metadata"]["labels"][NAME].clone());
    json!({ "matchExpressions": [{ "key": NAME, "operator": "In", "values": names }] })
}

/// The labels are `node` and `job`.
#[test]
fn pod_monitor_scrapes_and_labels_ports() {
    let monitor = yaml(POD_MONITOR);
    let endpoints = monitor["spec"]["podMetricsEndpoints"].as_array().unwrap();
    let ports: Vec<Value> = endpoints.iter().map(|endpoint| endpoint["port"].clone()).collect();
    assert_eq!(ports, all_metrics_ports());
    assert_eq!(monitor["spec"]["selector"], selector());
    // The operator sets the label job to the value of this label of the pod, and adds the label container itself.
    let job = monitor["spec"]["jobLabel"].as_str().unwrap();
    for template in pod_templates() {
        let mut expected =
            vec![json!({ "sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node" })];
        if template["metadata"]["labels"][job] != JOB {
            expected.push(json!({ "replacement": JOB, "targetLabel": "job" }));
        }
        let ports = metrics_ports(&template);
        for endpoint in endpoints.iter().filter(|endpoint| ports.contains(&endpoint["port"])) {
            assert_eq!(endpoint["relabelings"], json!(expected), "{}", endpoint["port"]);
        }
    }
}

#[test]
fn network_policy_admits_only_metrics_ports() {
    let policy = yaml(NETWORK_POLICY);
    let rules = policy["spec"]["ingress"].as_array().unwrap();
    let ports = rules.iter().flat_map(|rule| rule["ports"].as_array().unwrap());
    let ports: Vec<Value> = ports.map(|port| port["port"].clone()).collect();
    assert_eq!(ports, all_metrics_ports());
    assert!(
        rules.iter().all(|rule| !rule["from"].as_array().unwrap().is_empty()),
        "a rule admits every client"
    );
    assert_eq!(policy["spec"]["podSelector"], selector());
}
