//! Tests of dashboard.json.

use std::collections::BTreeSet;

use serde_json::Value;

use super::unknown_names;

const DASHBOARD: &str = include_str!("../../../monitoring/dashboard.json");

fn dashboard() -> Value {
    serde_json::from_str(DASHBOARD).unwrap()
}

/// Returns the panels with queries. A row has none.
fn panels() -> Vec<Value> {
    let panels = dashboard()["panels"].as_array().unwrap().clone();
    panels.into_iter().filter(|panel| panel["type"] != "row").collect()
}

/// The labels must be documented as well.
#[test]
fn queries_use_only_documented_metrics() {
    for panel in panels() {
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{} has no query", panel["title"]);
        for target in targets {
            let unknown = unknown_names(target["expr"].as_str().unwrap());
            assert!(unknown.is_empty(), "{}: README.md has no {unknown:?}", panel["title"]);
        }
    }
}

#[test]
fn node_variable_uses_documented_metric() {
    let variables = dashboard()["templating"]["list"].as_array().unwrap().clone();
    let node = variables.iter().find(|variable| variable["name"] == "node").unwrap();
    let query = node["query"]["query"].as_str().unwrap();
    let arguments = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).unwrap();
    let (metric, label) = arguments.split_once(", ").unwrap();
    assert_eq!((unknown_names(metric), label), (Vec::new(), "node"));
}

#[test]
fn panels_are_unique_without_overlap() {
    let all = dashboard()["panels"].as_array().unwrap().clone();
    let ids: BTreeSet<u64> = all.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), all.len());
    let mut cells = BTreeSet::new();
    for panel in &all {
        let number = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        for x in number("x")..number("x") + number("w") {
            assert!(x < 24, "{} is wider than the dashboard", panel["title"]);
            for y in number("y")..number("y") + number("h") {
                assert!(cells.insert((x, y)), "{} overlaps another panel", panel["title"]);
            }
        }
    }
}
