//! Tests of the component `csi/deploy/monitoring`.

use serde_json::{Value, json};

use super::alerts::RULES;
use super::yaml;

const PROMETHEUS_RULE: &str = include_str!("../../../deploy/monitoring/prometheusrule.yaml");
const POD_MONITOR: &str = include_str!("../../../deploy/monitoring/podmonitor.yaml");
const NETWORK_POLICY: &str = include_str!("../../../deploy/monitoring/networkpolicy.yaml");
const DAEMON_SET: &str = include_str!("../../../deploy/daemonset.yaml");

const UPDATE: &str = "UPDATE_RULES";

/// Returns the ports of the DaemonSet that serve metrics.
fn metrics_ports() -> Vec<Value> {
    let containers = yaml(DAEMON_SET)["spec"]["template"]["spec"]["containers"].as_array().unwrap().clone();
    let ports = containers.iter().flat_map(|container| container["ports"].as_array().unwrap().clone());
    let names = ports.map(|port| port["name"].clone());
    names.filter(|name| name.as_str().unwrap().ends_with("-metrics")).collect()
}

#[test]
fn the_prometheus_rule_has_the_rules_of_the_rules_file() {
    let (head, _) = PROMETHEUS_RULE.split_once("\nspec:\n").unwrap();
    let (_, groups) = RULES.split_once("\ngroups:\n").unwrap();
    let indented = |line: &str| format!("  {line}").trim_end().to_owned() + "\n";
    let groups: String = groups.lines().map(indented).collect();
    let expected = format!("{head}\nspec:\n  groups:\n{groups}");
    if std::env::var_os(UPDATE).is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/monitoring/prometheusrule.yaml");
        return std::fs::write(path, expected).unwrap();
    }
    assert_eq!(yaml(PROMETHEUS_RULE)["spec"], yaml(RULES), "run the test with {UPDATE}=1 to write the file");
}

#[test]
fn the_pod_monitor_scrapes_the_metrics_ports_and_sets_the_labels() {
    let monitor = yaml(POD_MONITOR);
    let endpoints = monitor["spec"]["podMetricsEndpoints"].as_array().unwrap();
    let ports: Vec<Value> = endpoints.iter().map(|endpoint| endpoint["port"].clone()).collect();
    assert_eq!(ports, metrics_ports());
    for endpoint in endpoints {
        let node = json!([{ "sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node" }]);
        assert_eq!(endpoint["relabelings"], node);
    }
    // The operator sets the label job to the value of this label of the pod, and adds the label container itself.
    let job = monitor["spec"]["jobLabel"].as_str().unwrap();
    let labels = &yaml(DAEMON_SET)["spec"]["template"]["metadata"]["labels"];
    assert_eq!(labels[job], "loopfs");
    assert_eq!(&monitor["spec"]["selector"]["matchLabels"], labels);
}

#[test]
fn the_network_policy_admits_clients_to_the_metrics_ports_alone() {
    let policy = yaml(NETWORK_POLICY);
    let rules = policy["spec"]["ingress"].as_array().unwrap();
    let ports = rules.iter().flat_map(|rule| rule["ports"].as_array().unwrap());
    let ports: Vec<Value> = ports.map(|port| port["port"].clone()).collect();
    assert_eq!(ports, metrics_ports());
    assert!(
        rules.iter().all(|rule| !rule["from"].as_array().unwrap().is_empty()),
        "a rule admits every client"
    );
    let labels = &yaml(DAEMON_SET)["spec"]["template"]["metadata"]["labels"];
    assert_eq!(&policy["spec"]["podSelector"]["matchLabels"], labels);
}
