//! Tests of the files for Prometheus and Grafana: they use the metrics and labels of README.md, and agree with each other.

mod alerts;
mod dashboard;
mod manifests;

use std::collections::BTreeSet;

use serde_json::Value;

use crate::documentation::{README, rows};

const PREFIXES: [&str; 3] = ["loopfs_csi_", "loopfs_provisioner_", "loopfs_controller_"];

/// The labels that a scrape adds, and that of the bucket limits of a histogram.
const FURTHER_LABELS: [&str; 4] = ["container", "job", "le", "node"];

/// The metric with which Prometheus reports whether a scrape succeeded.
const UP: &str = "up";

/// The words of PromQL that can stand without a parenthesis behind them.
const KEYWORDS: [&str; 17] = [
    "and",
    "avg",
    "bool",
    "by",
    "count",
    "group_left",
    "group_right",
    "ignoring",
    "max",
    "min",
    "offset",
    "on",
    "or",
    "quantile",
    "sum",
    "unless",
    "without",
];

fn yaml(text: &str) -> Value {
    serde_norway::from_str(text).unwrap()
}

/// Returns the metrics and labels of an expression of PromQL that are not in README.md. The expression is assumed to be valid, which
/// promtool checks.
fn unknown_names(expression: &str) -> Vec<String> {
    let mut known = BTreeSet::from([UP.to_owned()]);
    known.extend(FURTHER_LABELS.map(str::to_owned));
    for (name, metric) in PREFIXES.into_iter().flat_map(|prefix| rows(README, prefix)) {
        known.extend(metric.labels);
        if metric.kind == "histogram" {
            known.extend(["bucket", "count", "sum"].map(|part| format!("{name}_{part}")));
        } else {
            known.insert(name);
        }
    }
    names(expression).into_iter().filter(|name| !known.contains(name)).collect()
}

/// Returns the words of an expression that are metrics or labels.
fn names(expression: &str) -> BTreeSet<String> {
    // Every second part is a quoted text. None has an escaped quotation mark.
    let unquoted: String = expression.split('"').step_by(2).collect();
    // What is in brackets is a time range.
    let parts = unquoted.split('[').enumerate().map(|(number, part)| match part.split_once(']') {
        Some((_, after)) if number > 0 => after,
        _ => part,
    });
    let text: String = parts.collect();
    let is_word = |character: char| character.is_ascii_alphanumeric() || "_:.".contains(character);
    let words = text.split_inclusive(|character| !is_word(character)).filter_map(|part| {
        let word = part.trim_end_matches(|character| !is_word(character));
        let is_name = word.starts_with(|character: char| character.is_ascii_alphabetic() || character == '_');
        let is_function = part.ends_with('(');
        (is_name && !is_function && !KEYWORDS.contains(&word)).then(|| word.to_owned())
    });
    words.collect()
}

#[test]
fn metrics_and_labels_are_found() {
    let expression = r#"sum by (le, node) (rate(a_bucket{b=~"x|y",c!="a{b"}[$__rate_interval])) > 0.5 * time()
        unless on (d) min_over_time(e[5m] offset 1h) and f == 0"#;
    let expected = ["a_bucket", "b", "c", "d", "e", "f", "le", "node"];
    assert_eq!(names(expression), BTreeSet::from(expected.map(str::to_owned)));
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
