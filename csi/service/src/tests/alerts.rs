//! Tests of the alert rules and of rules_test.yaml. The lane unit has promtool check both files.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{unknown_names, yaml};
use crate::documentation::README;

const RULES: &str = include_str!("../../../deploy/monitoring/prometheusrule.yaml");
const RULES_TEST: &str = include_str!("../../../monitoring/rules_test.yaml");

fn rules() -> Vec<Value> {
    let groups = yaml(RULES)["spec"]["groups"].as_array().unwrap().clone();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
}

fn text<'a>(rule: &'a Value, pointer: &str) -> &'a str {
    let text = rule.pointer(pointer).and_then(Value::as_str);
    text.unwrap_or_else(|| panic!("{pointer} is not a text in {rule}"))
}

fn names() -> BTreeSet<String> {
    rules().iter().map(|rule| text(rule, "/alert").to_owned()).collect()
}

/// Returns the headings of README.md below the heading of the alerts.
fn headings() -> BTreeSet<String> {
    let section = README.split("\n## ").find_map(|section| section.strip_prefix("Alerts\n")).unwrap();
    section.lines().filter_map(|line| Some(line.strip_prefix("### ")?.to_owned())).collect()
}

/// Fails with the names that only one of two places has.
#[track_caller]
fn assert_same(left: &BTreeSet<String>, right: &BTreeSet<String>, places: &str) {
    let different: Vec<_> = left.symmetric_difference(right).collect();
    assert!(different.is_empty(), "only one of {places} has {different:?}");
}

#[test]
fn alerts_match_readme_headings() {
    assert_same(&names(), &headings(), "prometheusrule.yaml and the headings of alerts in README.md");
    assert_eq!(names().len(), rules().len(), "two alerts have one name");
}

/// It has a severity, a summary, a description and a link to its heading in the README.
#[test]
fn each_alert_is_described_completely() {
    for rule in rules() {
        let name = text(&rule, "/alert");
        let severity = text(&rule, "/labels/severity");
        assert!(["critical", "warning", "info"].contains(&severity), "{name}: {severity}");
        for part in ["/annotations/summary", "/annotations/description"] {
            let sentence = text(&rule, part);
            assert!(sentence.ends_with('.'), "{name}: {part} is no sentence: {sentence}");
        }
        let runbook = format!("csi/monitoring/README.md#{}", name.to_lowercase());
        assert_eq!(text(&rule, "/annotations/runbook"), runbook);
    }
}

/// The labels must be documented as well.
#[test]
fn alerts_use_only_documented_metrics() {
    for rule in rules() {
        let unknown = unknown_names(text(&rule, "/expr"));
        assert!(unknown.is_empty(), "{}: README.md has no {unknown:?}", text(&rule, "/alert"));
    }
}

/// Returns the alerts that one of the tests of promtool expects to fire (`true`) or not to fire (`false`).
fn expected(fires: bool) -> BTreeSet<String> {
    let tests = yaml(RULES_TEST)["tests"].as_array().unwrap().clone();
    let checks = tests.iter().flat_map(|test| test["promql_expr_test"].as_array().unwrap());
    let checks = checks.filter(|check| check["exp_samples"].as_array().unwrap().is_empty() != fires);
    let alert = |check: &Value| {
        let (_, name) = text(check, "/expr").split_once("alertname=\"")?;
        Some(name.split_once('"')?.0.to_owned())
    };
    checks.filter_map(alert).collect()
}

/// One case has series for which the alert fires, and the other has series for which it does not.
#[test]
fn each_alert_has_both_test_cases() {
    let places = "prometheusrule.yaml and the tests of rules_test.yaml in which an alert";
    assert_same(&names(), &expected(true), &format!("{places} fires"));
    assert_same(&names(), &expected(false), &format!("{places} does not fire"));
}
