//! Compares the Helm chart with the other places that have the same facts. The lane apiserver renders and installs the chart.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

/// Reads a file of `csi`.
fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("csi").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

fn yaml(path: &str) -> Value {
    serde_norway::from_str(&read(path)).unwrap()
}

fn schema() -> Value {
    serde_json::from_str(&read("chart/values.schema.json")).unwrap()
}

fn keys(value: &Value) -> BTreeSet<String> {
    value.as_object().into_iter().flat_map(|fields| fields.keys().cloned()).collect()
}

#[test]
fn chart_has_workspace_version() {
    let chart = yaml("chart/Chart.yaml");
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

/// Helm compares the values of the chart with the schema, but not the other way round.
#[test]
fn chart_has_each_value_of_the_schema() {
    let mut known = keys(&schema()["properties"]);
    // Helm adds this one.
    assert!(known.remove("global"));
    assert_eq!(known, keys(&yaml("chart/values.yaml")));
}

/// Every schema of an object either names its properties and no others, or gives a schema for all of them. Objects of Kubernetes that
/// the API server checks are the exception.
#[test]
fn schema_objects_refuse_unknown_keys() {
    const CHECKED_BY_THE_API_SERVER: [&str; 7] = [
        "nodeAffinity",
        "podAffinity",
        "podAntiAffinity",
        "podSelector",
        "namespaceSelector",
        "ipBlock",
        "global",
    ];
    fn check(name: &str, schema: &Value, checked: &mut usize) {
        if schema["type"] == "object" && !CHECKED_BY_THE_API_SERVER.contains(&name) {
            *checked += 1;
            let others = &schema["additionalProperties"];
            assert!(*others == false || others.is_object(), "{name}: unknown keys are accepted");
        }
        for group in ["properties", "definitions"] {
            for (name, property) in schema[group].as_object().into_iter().flatten() {
                check(name, property, checked);
            }
        }
        if schema["items"].is_object() {
            check(name, &schema["items"], checked);
        }
    }
    let mut checked = 0;
    check("", &schema(), &mut checked);
    assert!(checked > 15, "only {checked} objects were checked");
}

/// Returns the quoted paths in the first statement of a text that begins with a word.
fn paths(text: &str, begin: &str, end: &str) -> BTreeSet<String> {
    let statement = text.split(begin).nth(1).unwrap_or_else(|| panic!("no {begin}"));
    let statement = statement.split(end).next().unwrap();
    statement.split('"').filter(|path| path.starts_with('/')).map(str::to_owned).collect()
}

/// A data directory in `/` has one component, which the schema refuses.
#[test]
fn chart_and_doctor_directories_match() {
    let chart = paths(&read("chart/templates/_objects.tpl"), "$shared := list", "-}}");
    let mut doctor = paths(&read("../loopfs/tool/src/preflight/data_dir.rs"), "const SHARED:", "];");
    assert!(doctor.remove("/"));
    assert_eq!(chart, doctor);
    assert!(chart.contains("/var/lib"), "{chart:?}");
}
