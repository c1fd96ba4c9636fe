//! Tests of the files for Prometheus and Grafana: they use the metrics and labels of README.md, and agree with each other.

mod alerts;
mod dashboard;
mod manifests;
mod promql;

use std::collections::BTreeSet;

use serde_json::Value;

use crate::documentation::{README, rows};

const PREFIXES: [&str; 3] = ["loopfs_csi_", "loopfs_provisioner_", "loopfs_controller_"];

/// The labels that a scrape adds, and that of the bucket limits of a histogram.
const FURTHER_LABELS: [&str; 4] = ["container", "job", "le", "node"];

/// The metric with which Prometheus reports whether a scrape succeeded.
const UP: &str = "up";

fn yaml(text: &str) -> Value {
    serde_norway::from_str(text).unwrap()
}

/// Returns the metrics and labels of an expression that are not in README.md.
fn unknown_names(expression: &str) -> Vec<String> {
    let (mut metrics, mut labels) = (BTreeSet::from([UP.to_owned()]), BTreeSet::new());
    labels.extend(FURTHER_LABELS.map(str::to_owned));
    for (name, metric) in PREFIXES.into_iter().flat_map(|prefix| rows(README, prefix)) {
        labels.extend(metric.labels);
        if metric.kind == "histogram" {
            metrics.extend(["bucket", "count", "sum"].map(|part| format!("{name}_{part}")));
        } else {
            metrics.insert(name);
        }
    }
    let names = promql::names(expression);
    names.metrics.difference(&metrics).chain(names.labels.difference(&labels)).cloned().collect()
}

#[test]
fn unknown_metrics_and_labels_are_found() {
    let known = r#"sum by (node) (loopfs_csi_rpcs_total{code="OK"}) / up"#;
    assert_eq!(unknown_names(known), Vec::<String>::new());
    for (expression, unknown) in [
        ("loopfs_csi_rpcs > 0", "loopfs_csi_rpcs"),
        ("rate(loopfs_csi_rpc_duration_seconds[5m])", "loopfs_csi_rpc_duration_seconds"),
        ("sum by (nodes) (up)", "nodes"),
        (r#"up{instances="a"}"#, "instances"),
    ] {
        assert_eq!(unknown_names(expression), [unknown], "{expression}");
    }
}
